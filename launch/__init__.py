"""The front door: command line, torchrun, cluster jobs, doctor."""

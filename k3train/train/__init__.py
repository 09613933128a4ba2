"""The training loop: assembled in one place, stepped in another."""

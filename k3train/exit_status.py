"""What a process of a run ends with: the one table of the loop, the agent and the jobs of schedulers."""

from __future__ import annotations

DONE = 0
"""The last step is saved."""
FAILED = 1
"""Anything that is not below: a rank died, an error of ours."""
REFUSED = 2
"""The configuration or an input cannot be used."""
DIVERGED = 3
"""The loss or a gradient was not finite, or spiked more often than the run goes back."""
UNHEALTHY = 4
"""A check before the start found a GPU, disk, clock or network wanting."""
SAVED = 75
"""A stop signal came and the state is saved; the same command continues it. EX_TEMPFAIL of sysexits.h."""
HUNG = 124
"""The watchdog found that no rank moved."""
INTERRUPTED = 130
"""A second Ctrl-C: nothing is saved since the last checkpoint."""

FINAL = (REFUSED, DIVERGED)
"""The same start would end the same way: nothing starts the run again by itself."""

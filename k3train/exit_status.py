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

MEANINGS = {
    DONE: "done, or already done",
    FAILED: "anything else: a rank died, an error of ours",
    REFUSED: "refused configuration or input, in one line on standard error",
    DIVERGED: "a loss or gradient that is not finite, or one loss spike too many",
    UNHEALTHY: "a GPU, disk, clock or network failed its check before the start",
    SAVED: "stopped by a signal and saved; the same command continues it",
    HUNG: "no rank moved, and the watchdog ended the run",
    INTERRUPTED: "interrupted twice; nothing was saved since the last checkpoint",
}

FINAL = (REFUSED, DIVERGED)
"""The same start would end the same way: nothing starts the run again by itself."""

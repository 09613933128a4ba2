"""Keys of the alerts of a run. Pure data, as `config`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AlertConfig:
    """What a run warns of, once each time that it begins; a rule whose limit is 0 is off."""

    loss_spike: float = 10.0
    """Jump of the loss above the median of the lines before, in their median absolute deviations, and 0.1
    nats at least."""
    imbalance: float = 4.0
    """Rows of the busiest expert-parallel rank over the mean (`moe_rows_max_over_mean`)."""
    stall: float = 4.0
    """Time of a step over the median of the lines before, and 10 s longer at least."""
    nonfinite: float = 1.0
    """Steps skipped, or losses that are not finite, since the line before."""
    disk_gib: float = 4.0
    """Free space of the file system of `run.dir`, GiB, below which it is nearly full."""
    checkpoint_minutes: float = 180.0
    """Age of the newest complete checkpoint; with `checkpoint.every=0` there is none to wait for."""
    lines: int = 3
    """Lines in a row, one every `log.every` steps, that loss and imbalance are above their limit before the
    alert, and that any alert is below `clear` before it is over; the other rules warn at once."""
    clear: float = 0.8
    """Share of the limit below which an alert is over, so that a value near the limit does not warn again
    and again."""
    webhook_env: str | None = None
    """Name of the environment variable that holds the URL which gets each alert as JSON; the URL itself is
    never in a configuration, a log or a report."""

"""Keys of what a run does when something goes wrong. Pure data, as `config`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpikeConfig:
    """When the loss jumps: back to the checkpoint before, and on past the samples that it jumped at."""

    threshold: float | None = None
    """Jump from which a step is suspect: its loss less the median of `window` steps before, in their median
    absolute deviations; 10 or more. Off when left out."""
    floor: float = 0.05
    """Nats by which a suspect loss is above the median at least, however quiet the window was."""
    window: int = 128
    """Steps before, suspect ones left out, that a loss is compared with; nothing is suspect before a quarter
    of them."""
    steps: int = 3
    """Suspect steps in a row that are a spike."""
    rollbacks: int = 5
    """Spikes that a run goes back for; it stops at the next one."""


@dataclass
class FaultConfig:
    """How a run notices that something is wrong, and what it does then."""

    hang_seconds: float = 300.0
    """No rank has begun or ended an operation or phase for so long: the run hangs, and every rank ends with
    status 124. 0 turns the watchdog off."""
    hang_steps: float = 20.0
    """The same in median times of a step: the longer of the two counts."""
    meet_seconds: float = 300.0
    """Takes the place of `hang_seconds` from the start of the ranks until all have met: no rank has computed,
    read or written anything for so long."""
    start_seconds: float = 3600.0
    """Takes the place of `hang_seconds` from there up to the end of the first step, of a stage too, while
    kernels are compiled and checkpoints read, and behind the last one."""
    max_restarts: int = 3
    """Times in a row, without a new checkpoint in between, that the agent starts all ranks again when one has
    died or hung."""
    straggler_ratio: float = 1.3
    """Own time of a rank over the median of its peers from which it is slow; 0 measures nothing."""
    straggler_reports: int = 5
    """Reports in a row, one every `log.every` steps, in which a rank is slow before it is named."""
    health: bool = False
    """Check GPUs, disk, clocks and network before the run."""
    health_slow: float = 0.7
    """Share of the ranks' median speed of products below which a rank is refused."""
    health_skew_seconds: float = 5.0
    """Largest difference between the clocks of two nodes."""
    spike: SpikeConfig = field(default_factory=SpikeConfig)

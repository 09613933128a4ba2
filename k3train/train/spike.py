"""Loss spikes: what counts as one, how far back the run goes, and which samples it leaves out from then on.

Everything follows from the losses, which are the same on every rank, and from what the checkpoint holds; so
all ranks decide alike, and a run that was killed and goes on decides as if it had not been.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..fault_config import SpikeConfig


class SpikeError(RuntimeError):
    """The loss spiked once more than the run goes back."""


@dataclass(frozen=True)
class Spike:
    """Suspect steps `first` to `last`, in a row."""

    first: int
    last: int
    loss: float
    median: float
    limit: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} at step {self.last}, above {self.limit:.4f} since step {self.first} "
            f"(median {self.median:.4f})"
        )


@dataclass
class SpikeWatch:
    """Judges the loss of every step; its state goes with the checkpoints."""

    config: SpikeConfig
    losses: list[float] = field(default_factory=list)
    """Of the last `window` steps that were not suspect."""
    suspects: int = 0
    """Steps in a row up to the last one that were."""
    rollbacks: int = 0
    skips: dict[int, int] = field(default_factory=dict)
    """Step -> steps whose samples are left out before it."""

    @property
    def active(self) -> bool:
        """Whether spikes are looked for."""
        return self.config.threshold is not None

    @property
    def limit(self) -> float:
        """Loss above which a step is suspect; infinite while too few were seen."""
        config, losses = self.config, self.losses
        if config.threshold is None or 4 * len(losses) < config.window:
            return math.inf
        median = statistics.median(losses)
        deviation = statistics.median(abs(loss - median) for loss in losses)
        return median + max(config.threshold * deviation, config.floor)

    def observe(self, step: int, loss: float) -> Spike | None:
        """Take in a step's loss; the spike that it completes, if it does. A loss that is not finite is no
        step: nothing was learnt from it."""
        if not self.active or not math.isfinite(loss):
            return None
        limit = self.limit
        if loss <= limit:
            self.losses = [*self.losses, loss][-self.config.window :]
            self.suspects = 0
            return None
        self.suspects += 1
        if self.suspects < self.config.steps:
            return None
        return Spike(step - self.suspects + 1, step, loss, statistics.median(self.losses), limit)

    def go_back(self, spike: Spike, saved: Mapping[str, Any] | None) -> None:
        """Count a rollback to a checkpoint that holds `saved`, and leave the spike's samples out."""
        skips, rollbacks = dict(self.skips), self.rollbacks + 1
        self.restore(saved)
        skips[spike.first] = skips.get(spike.first, 0) + spike.last - spike.first + 1
        self.skips, self.rollbacks = skips, rollbacks

    def give_up(self) -> None:
        """Go on with what there is: no checkpoint lies before the spike."""
        self.losses, self.suspects = [], 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; {} where spikes are not looked for and never were."""
        if not (self.active or self.skips):
            return {}
        skips = {str(step): count for step, count in self.skips.items()}
        return {
            "spike": {
                "losses": self.losses,
                "suspects": self.suspects,
                "rollbacks": self.rollbacks,
                "skips": skips,
            }
        }

    def restore(self, extra: Mapping[str, Any] | None) -> None:
        """Take over what `state` put into a checkpoint."""
        saved = (extra or {}).get("spike", {})
        self.losses = list(saved.get("losses", []))[-self.config.window :]
        self.suspects = int(saved.get("suspects", 0))
        self.rollbacks = int(saved.get("rollbacks", 0))
        self.skips = {int(step): count for step, count in saved.get("skips", {}).items()}

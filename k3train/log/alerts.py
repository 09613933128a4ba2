"""Alerts: which conditions of a run are worth a person's attention, judged line by line on the first rank.

Every rule gives a line a level, its value over its limit. 1 and more begins an episode, which is told once;
below `clear` for some lines ends it. Nothing here reaches the ranks' exchanges or the state of the run.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..alert_config import AlertConfig
from ..checkpoint.folders import available, complete

WINDOW = 64
"""Lines that a value is compared with; nothing is judged against fewer than a quarter of them."""
LOSS_FLOOR = 0.1
"""Nats by which a loss jumps at least."""
STALL_FLOOR = 10.0
"""Seconds by which a step is longer at least."""
LOOK_SECONDS = 30.0
"""Between two looks at the disk and the checkpoints, which may be far away."""
GIB = 2**30


@dataclass(frozen=True)
class Level:
    """How near a line is to the limit of a rule, and what it says in words."""

    share: float
    """Value over limit."""
    text: str


@dataclass(frozen=True)
class Alert:
    """The begin or the end of an episode."""

    rule: str
    text: str
    over: bool = False

    @property
    def title(self) -> str:
        """A headline for services that want one."""
        return f"{self.rule.replace('_', ' ')}{' is over' if self.over else ''}"


@dataclass
class Typical:
    """Recent values that were not out of the ordinary."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def ready(self) -> bool:
        """Whether there are enough to compare with."""
        return 4 * len(self.values) >= WINDOW

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def deviation(self) -> float:
        """Median distance from the median."""
        middle = self.median
        return statistics.median(abs(value - middle) for value in self.values)


@dataclass
class Episode:
    """Whether one rule's alert is on: from `begin` lines at the limit to `end` below `clear`, in a row."""

    begin: int
    end: int
    clear: float
    active: bool = False
    _lines: int = 0

    def take(self, share: float) -> bool:
        """Take in a level; whether the alert has just begun or ended."""
        turning = share < self.clear if self.active else share >= 1
        self._lines = self._lines + 1 if turning else 0
        if self._lines < (self.end if self.active else self.begin):
            return False
        self.active, self._lines = not self.active, 0
        return True


class Alerts:
    """The rules of one run."""

    def __init__(
        self,
        config: AlertConfig,
        run_dir: Path,
        *,
        checkpoints: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`checkpoints`: whether the run writes any. `clock` gives seconds since 1970."""
        self.config, self.run_dir, self._clock = config, run_dir, clock
        self.losses, self.steps = Typical(), Typical()
        self.started = clock()
        self.skipped: int | None = None
        self._looked: tuple[float, float, float] | None = None
        self._saved = 0.0
        rules: dict[str, tuple[float, Callable[[Mapping[str, Any]], Level | None], int]] = {
            "loss_spike": (config.loss_spike, self._loss, config.lines),
            "imbalance": (config.imbalance, self._imbalance, config.lines),
            "stall": (config.stall, self._stall, 1),
            "nonfinite": (config.nonfinite, self._nonfinite, 1),
            "disk": (config.disk_gib, self._disk, 1),
            "checkpoint": (config.checkpoint_minutes if checkpoints else 0, self._checkpoint, 1),
        }
        self._rules = {name: level for name, (limit, level, _) in rules.items() if limit > 0}
        self._episodes = {name: Episode(rules[name][2], config.lines, config.clear) for name in self._rules}

    @property
    def active(self) -> dict[str, bool]:
        """Rule -> whether its alert is on; rules that are off are left out."""
        return {name: episode.active for name, episode in self._episodes.items()}

    def observe(self, metrics: Mapping[str, Any]) -> list[Alert]:
        """Take in one line of metrics; the alerts that begin or end with it."""
        found = []
        for name, judge in self._rules.items():
            level = judge(metrics)
            if level is not None and self._episodes[name].take(level.share):
                over = not self._episodes[name].active
                found.append(Alert(name, level.text, over))
        return found

    def status(self) -> dict[str, float]:
        """What the looks at the file system gave last: free bytes, and the age of the newest checkpoint."""
        free, age, _ = self._look()
        return {"disk_free_bytes": free, "checkpoint_age_seconds": age}

    def _loss(self, metrics: Mapping[str, Any]) -> Level | None:
        loss = _number(metrics, "loss")
        if loss is None or not math.isfinite(loss):
            return None
        if not self.losses.ready:
            self.losses.values.append(loss)
            return None
        median = self.losses.median
        allowed = max(self.config.loss_spike * self.losses.deviation, LOSS_FLOOR)
        if loss < median + allowed:
            self.losses.values.append(loss)
        return Level((loss - median) / allowed, f"loss {loss:.4f}, median of the lines before {median:.4f}")

    def _imbalance(self, metrics: Mapping[str, Any]) -> Level | None:
        ratio = _number(metrics, "moe_rows_max_over_mean")
        if ratio is None:
            return None
        return Level(
            ratio / self.config.imbalance,
            f"the busiest rank has {ratio:.2f} times the mean rows of its experts (limit "
            f"{self.config.imbalance:g})",
        )

    def _stall(self, metrics: Mapping[str, Any]) -> Level | None:
        seconds = _number(metrics, "time/step")
        if seconds is None:
            return None
        if not self.steps.ready:
            self.steps.values.append(seconds)
            return None
        median = self.steps.median
        limit = max(self.config.stall * median, median + STALL_FLOOR)
        if seconds < limit:
            self.steps.values.append(seconds)
        return Level(
            seconds / limit, f"a step took {seconds:.2f} s, median of the lines before {median:.2f} s"
        )

    def _nonfinite(self, metrics: Mapping[str, Any]) -> Level | None:
        skipped = int(metrics.get("skipped_steps", 0))
        # The first line of a continued run counts what was skipped before.
        fresh = 0 if self.skipped is None else max(0, skipped - self.skipped)
        self.skipped = skipped
        loss = _number(metrics, "loss")
        broken = loss is not None and not math.isfinite(loss)
        count = max(fresh, int(broken))
        text = f"loss {loss}" if broken else f"{fresh} steps skipped since the line before, {skipped} in all"
        return Level(count / self.config.nonfinite, text)

    def _disk(self, metrics: Mapping[str, Any]) -> Level | None:
        free = self._look()[0]
        share = self.config.disk_gib * GIB / max(free, 1)
        return Level(
            share, f"{free / GIB:.2f} GiB free for {self.run_dir} (limit {self.config.disk_gib:g} GiB)"
        )

    def _checkpoint(self, metrics: Mapping[str, Any]) -> Level | None:
        minutes = self._look()[1] / 60
        limit = self.config.checkpoint_minutes
        return Level(minutes / limit, f"the newest checkpoint is {minutes:.0f} minutes old (limit {limit:g})")

    def _look(self) -> tuple[float, float, float]:
        """Free bytes, age of the newest checkpoint in seconds, and when that was found out."""
        now = self._clock()
        if self._looked is None or now - self._looked[2] >= LOOK_SECONDS:
            free, saved = self._looked[0] if self._looked else math.inf, self._saved
            # A folder that is being pruned, or a file system that does not answer, gives no new answer.
            with suppress(OSError):
                free, saved = float(shutil.disk_usage(self.run_dir).free), self._newest()
            # Without a checkpoint the start counts: so much work would be lost.
            self._saved = saved
            self._looked = free, max(0.0, now - max(saved, self.started)), now
        return self._looked

    def _newest(self) -> float:
        """When the newest complete checkpoint was written, seconds since 1970; 0 without one."""
        root = self.run_dir / "checkpoints"
        steps = available(root)
        return complete(root, steps[-1]).stat().st_mtime if steps else 0.0


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else None

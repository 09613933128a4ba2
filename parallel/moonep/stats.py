"""What balancing did and cost, summed over the layers' calls of a step.

Everything counted here rides on the one copy to the host that the transfers need anyway. Letters: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .route import Clock, Sizes, Split
from .waves import wave_size


@dataclass
class Stats:
    """Counts of one or several layers since the last `read`. Numbers of the whole group, unless said."""

    rank: int
    calls: int = 0
    _before: list[float] = field(default_factory=list)
    _after: list[float] = field(default_factory=list)
    _replicas: list[int] = field(default_factory=list)
    _rows: int = 0
    _moved: int = 0
    _padding: int = 0
    _waves: int = 0
    _prefetch_bytes: int = 0
    _entries_sent: int = 0
    _rows_sent: int = 0
    _clocks: list[Clock] = field(default_factory=list)

    def count(self, sizes: Sizes, clock: Clock, slots: int, expert_bytes: int) -> None:
        """Take note of one planned call. `expert_bytes` is the size of one expert's weights."""
        replicas = [len(experts) for experts in sizes.slots]
        rows = sum(sizes.loads)
        self.calls += 1
        self._before.append(_max_over_mean(sizes.home_loads))
        self._after.append(_max_over_mean(sizes.loads))
        self._replicas += replicas
        self._rows += rows
        self._moved += sizes.moved
        self._padding += sum(sizes.padded) - rows
        most = max(replicas)
        self._waves += max(1, -(-most // wave_size(most, slots)))
        self._prefetch_bytes += replicas[self.rank] * expert_bytes
        self._entries_sent += _to_others(sizes.entries, self.rank)
        self._rows_sent += _to_others(sizes.payloads, self.rank)
        self._clocks.append(clock)

    def read(self) -> dict[str, float]:
        """The step's numbers, and begin anew. On a GPU the host waits for the planner's last clock.

        Returns:
            `max_over_mean_before` and `_after`: rows of the fullest rank over the mean, with every expert at
            home and as planned (mean over calls; `_worst` the largest); `replicas_mean` and `_max`: borrowed
            experts of a rank; `moved_share`: rows computed away from home; `padding_share`: padding rows over
            real ones; `waves_mean`; `plan_ms`: of one call. Of this rank, per call: `prefetch_bytes`,
            bytes of borrowed experts that it receives in forward; `entries_sent` to other ranks, and
            `rows_sent`, what de-duplication leaves of them. Empty if nothing was planned.
        """
        if not self.calls:
            return {}
        calls, rows = self.calls, max(1, self._rows)
        found = {
            "max_over_mean_before": sum(self._before) / calls,
            "max_over_mean_before_worst": max(self._before),
            "max_over_mean_after": sum(self._after) / calls,
            "max_over_mean_after_worst": max(self._after),
            "replicas_mean": sum(self._replicas) / len(self._replicas),
            "replicas_max": float(max(self._replicas)),
            "moved_share": self._moved / rows,
            "padding_share": self._padding / rows,
            "waves_mean": self._waves / calls,
            "plan_ms": sum(clock.milliseconds() for clock in self._clocks) / calls,
            "prefetch_bytes": self._prefetch_bytes / calls,
            "entries_sent": self._entries_sent / calls,
            "rows_sent": self._rows_sent / calls,
        }
        self.__init__(self.rank)  # type: ignore[misc]
        return found


def _max_over_mean(loads: list[int]) -> float:
    """1.0 for perfect balance, or for nothing to balance."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _to_others(split: Split, rank: int) -> int:
    return sum(split.sent) - split.sent[rank]

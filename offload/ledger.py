"""Bytes that the activation manager holds, by where they are, and how they change over a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Ledger:
    """Counts of bytes now and at their highest.

    `device`: tensors as they were saved, those on their way out among them; `fp8`: their FP8 on the device;
    `window`: what has been brought back to be used; then one name for each tier.
    """

    def __init__(self, tiers: Callable[[], dict[str, int]]) -> None:
        """`tiers`: bytes that each tier holds now."""
        self._tiers = tiers
        self._now: Counter[str] = Counter()
        self._total = 0
        self.peak: Counter[str] = Counter()
        """`total`: of all on the device."""
        self.series: list[tuple[str, dict[str, int]]] | None = None
        """Where a list: (operation, bytes by place behind it)."""

    def add(self, place: str, nbytes: int) -> None:
        """Count bytes that come, or go."""
        self._now[place] += nbytes
        self._total += nbytes
        if nbytes > 0:
            self.peak[place] = max(self.peak[place], self._now[place])
            self.peak["total"] = max(self.peak["total"], self._total)

    def now(self) -> dict[str, int]:
        """Bytes by place."""
        return {"device": 0, "fp8": 0, "window": 0, **self._now, **self._tiers()}

    def mark(self, operation: str) -> None:
        """Note what is held behind an operation."""
        held = self.now()
        for place, nbytes in held.items():
            self.peak[place] = max(self.peak[place], nbytes)
        if self.series is not None:
            self.series.append((operation, held))

"""Places in one region of bytes; the bookkeeping of a tier.

Saved tensors have a few dozen sizes that come again with every micro-batch. A place that is given back is
therefore kept whole for the next parcel of its size: found in O(1), and nothing is cut to pieces in steady
state. Only when neither such a place nor the untouched end of the region is left, neighbours are merged and
the smallest span that fits is cut.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass

from ..files.alignment import round_up
from . import TierFull


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes offset .. end of the region."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.offset + self.nbytes


class Pool:
    """Gives out places of a region of `capacity` bytes; may be used by several threads."""

    def __init__(self, capacity: int, grain: int) -> None:
        """Offsets and sizes are multiples of `grain`."""
        self.capacity, self.used, self.peak = capacity // grain * grain, 0, 0
        self._grain = grain
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # size -> offsets
        self._end = 0  # what lies behind was never used
        self._can_merge = False
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Place:
        """A place of at least `nbytes`. Raises TierFull."""
        size = round_up(max(nbytes, 1), self._grain)
        with self._lock:
            offset = self._find(size)
            if offset is None:
                raise TierFull(f"{self.used} of {self.capacity} bytes are in use, {size} more are needed")
            self.used += size
            self.peak = max(self.peak, self.used)
        return Place(offset, size)

    def give(self, place: Place) -> None:
        """Give a place back."""
        with self._lock:
            self._free[place.nbytes].append(place.offset)
            self._can_merge = True
            self.used -= place.nbytes

    @property
    def reached(self) -> int:
        """Bytes of the region that were ever in use since it was last empty behind them."""
        return self._end

    def _find(self, size: int) -> int | None:
        same = self._free[size]
        if same:
            return same.pop()
        if self._end + size > self.capacity and self.used + size <= self.capacity:
            self._merge()
            fitting = [span for span, offsets in self._free.items() if span >= size and offsets]
            if fitting:
                return self._cut(min(fitting), size)
        if self._end + size > self.capacity:
            return None
        self._end += size
        return self._end - size

    def _cut(self, span: int, size: int) -> int:
        offset = self._free[span].pop()
        if span > size:
            self._free[span - size].append(offset + size)
        return offset

    def _merge(self) -> None:
        """Join free neighbours, and give what is free at the end back to it."""
        if not self._can_merge:
            return
        spans: list[list[int]] = []
        for offset, size in sorted(
            (offset, size) for size, offsets in self._free.items() for offset in offsets
        ):
            if spans and sum(spans[-1]) == offset:
                spans[-1][1] += size
            else:
                spans.append([offset, size])
        if spans and sum(spans[-1]) == self._end:
            self._end = spans.pop()[0]
        self._free.clear()
        # The lowest places are used first, so that the end stays free.
        for offset, size in reversed(spans):
            self._free[size].append(offset)
        self._can_merge = False

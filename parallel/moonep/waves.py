"""Experts in turn: borrowed experts come in waves, the next ones while the rows of the last are computed.

A wave fetches some experts to each rank and computes their rows; the first one computes the experts at home
as well. Rows, and what is computed of them, do not depend on the waves; all ranks run as many as the most
borrowing rank needs. Letters: B slots, P experts at home, G = 2P segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .exchange import fetch_experts
from .experts import Segments
from .route import Route
from .transport import Transport

PIECES = 4
"""Waves into which many borrowed experts are cut, so that all but the first travel behind computation."""
FEW = 2
"""Borrowed experts that are not worth a second wave."""


def wave_size(most: int, slots: int) -> int:
    """Experts that a rank fetches for a wave, where the most borrowing rank needs `most`.

    Two waves' experts are held at a time, so that each has half of the slots, where there are several.
    """
    if most <= min(FEW, slots):
        return max(1, most)
    return min(max(1, slots // 2), -(-most // PIECES))


@dataclass(frozen=True)
class Wave:
    """The part of this rank's rows that is computed together."""

    wanted: list[list[int]]
    """Experts that each rank borrows for it."""
    home: bool
    """The P experts at home come first among its groups."""
    rows: slice
    segments: Segments

    @property
    def empty(self) -> bool:
        """This rank computes nothing in it, though it takes part in the transfers."""
        return self.rows.stop == self.rows.start


def waves(route: Route, slots: int) -> list[Wave]:
    """Cut a route into waves that leave at most `slots` borrowed experts on a rank; as many on every rank."""
    table, ends, places = route.sizes.slots, [0, *route.sizes.ends], route.places
    rank, most = route.plan.rank, max(map(len, table))
    size = wave_size(most, slots)
    found = []
    for first in range(0, max(1, most), size):
        wanted = [experts[first : first + size] for experts in table]
        begin = 0 if first == 0 else places + min(first, len(table[rank]))
        end = places + min(first + size, len(table[rank]))
        counts = [ends[group + 1] - ends[group] for group in range(begin, end)]
        device_ends = route.plan.ends[rank, begin:end] - ends[begin]
        found.append(Wave(wanted, first == 0, slice(ends[begin], ends[end]), Segments(counts, device_ends)))
    return found


class BorrowedExperts:
    """The weights of each wave in turn. The first wave's are fetched at once, each further one's while the
    one before is computed; with a single slot, when they are due.

    Iterate once on every rank. The lists of weights are emptied when the loop goes on: no more than B
    borrowed experts are held.
    """

    def __init__(
        self,
        transport: Transport,
        cut: Sequence[Wave],
        slots: int,
        own: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> None:
        self.transport, self.waves, self.own = transport, cut, own
        self._ahead = slots > 1
        self._coming = [fetch_experts(transport, cut[0].wanted, own)]

    def __iter__(self) -> Iterator[tuple[Wave, list[Tensor], list[Tensor]]]:
        """(wave, W1 of its groups, W2 of its groups)."""
        for number, wave in enumerate(self.waves):
            if not self._coming:
                self._coming.append(fetch_experts(self.transport, wave.wanted, self.own))
            w1, w2 = (arriving.wait() for arriving in self._coming.pop())
            if self._ahead and number + 1 < len(self.waves):
                self._coming.append(fetch_experts(self.transport, self.waves[number + 1].wanted, self.own))
            if wave.home:
                w1, w2 = [*self.own[0], *w1], [*self.own[1], *w2]
            yield wave, w1, w2
            w1.clear()
            w2.clear()

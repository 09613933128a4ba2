"""Experts in turn: borrowed experts come in waves, later ones while the rows of earlier ones are computed.

A wave computes a run of this rank's rows: experts at home and borrowed ones. A rank that borrows begins with
its experts at home, while the first borrowed ones travel; one that lends spreads its rows over all waves, so
that it meets the gradients of the experts that it lent when they are sent. Rows, and what is computed of
them, do not depend on the waves; all ranks run as many as the most borrowing rank needs. Letters: B slots, P
experts at home, G = 2P segments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from .codec import EXACT, Codec
from .exchange import fetch_experts
from .experts import Segments
from .route import Route
from .transport import Pending, Transport

PIECES = 4
"""Waves into which many borrowed experts are cut, so that they travel behind computation."""
FEW = 2
"""Borrowed experts that are not worth a second wave."""


def wave_size(most: int, slots: int) -> int:
    """Experts that a rank fetches for a wave, where the most borrowing rank needs `most`.

    Where the slots do not hold all, each wave has half of them, so that the next one is on its way.
    """
    if most <= min(FEW, slots):
        return max(1, most)
    return min(max(1, slots // 2), -(-most // PIECES))


@dataclass(frozen=True)
class Wave:
    """The part of this rank's rows that is computed together."""

    wanted: list[list[int]]
    """Experts that each rank borrows for it."""
    home: slice
    """Places of the experts at home among its groups; they come first."""
    rows: slice
    segments: Segments

    @property
    def empty(self) -> bool:
        """This rank computes nothing in it, though it takes part in the transfers."""
        return self.rows.stop == self.rows.start

    @cached_property
    def most(self) -> int:
        """Experts that the most borrowing rank borrows for it; the same on all ranks."""
        return max(map(len, self.wanted))


def waves(route: Route, slots: int) -> list[Wave]:
    """Cut a route into waves that leave at most `slots` borrowed experts on a rank; as many on every rank."""
    table, places = route.sizes.slots, route.places
    most = max(map(len, table))
    size = wave_size(most, slots)
    wanted, homes = [table], [slice(0, places)]
    if size < most:
        # The first wave waits for no transfer.
        cut = [[experts[first : first + size] for experts in table] for first in range(0, most, size)]
        wanted = [[[] for _ in table], *cut]
        homes = _homes(route, len(wanted))
    group, found = 0, []
    for experts, home in zip(wanted, homes, strict=True):
        end = group + home.stop - home.start + len(experts[route.plan.rank])
        found.append(_wave(route, experts, home, group, end))
        group = end
    return found


def _homes(route: Route, count: int) -> list[slice]:
    """Places of the experts at home that each of `count` waves computes."""
    places = route.places
    if route.sizes.slots[route.plan.rank]:
        return [slice(0, places), *[slice(places, places)] * (count - 1)]
    ends = [0, *route.sizes.ends[:places]]
    cuts = [bisect_left(ends, ends[-1] * number / count, hi=places) for number in range(count)] + [places]
    return [slice(first, last) for first, last in pairwise(cuts)]


def _wave(route: Route, wanted: list[list[int]], home: slice, begin: int, end: int) -> Wave:
    """The wave of the groups begin .. end."""
    ends = [0, *route.sizes.ends]
    counts = [ends[group + 1] - ends[group] for group in range(begin, end)]
    device_ends = route.plan.ends[route.plan.rank, begin:end] - ends[begin]
    return Wave(wanted, home, slice(ends[begin], ends[end]), Segments(counts, device_ends))


class BorrowedExperts:
    """The weights of each wave in turn. A wave's are fetched as soon as the slots hold them beside those that
    have not been computed yet: at once, where the slots hold all.

    Iterate once on every rank. The lists of weights are emptied when the loop goes on: no more than B
    borrowed experts are held.
    """

    def __init__(
        self,
        transport: Transport,
        cut: Sequence[Wave],
        slots: int,
        own: tuple[Sequence[Tensor], Sequence[Tensor]],
        codec: Codec = EXACT,
    ) -> None:
        self.transport, self.waves, self.slots, self.codec = transport, cut, slots, codec
        self.like = [weights[0] for weights in own]
        self.packed = [codec.pack(weights) for weights in own] if any(wave.most for wave in cut) else []
        self._fetched = 0
        self._coming: deque[list[Pending[list[Tensor]]]] = deque()
        self._fetch(0)
        # Rounded at home while the first borrowed ones travel.
        self.own = [codec.weights(weights) for weights in own]

    def __iter__(self) -> Iterator[tuple[Wave, list[Tensor], list[Tensor]]]:
        """(wave, W1 of its groups, W2 of its groups)."""
        for number, wave in enumerate(self.waves):
            self._fetch(number)
            arrived = [arriving.wait() for arriving in self._coming.popleft()] or [[], []]
            pairs = zip(arrived, self.like, strict=True)
            borrowed = [self.codec.unpack(packed, like) for packed, like in pairs]
            del arrived
            w1, w2 = ([*own[wave.home], *more] for own, more in zip(self.own, borrowed, strict=True))
            del borrowed
            yield wave, w1, w2
            w1.clear()
            w2.clear()
        self.own, self.packed = [], []

    def _fetch(self, computed: int) -> None:
        """Fetch the experts of wave `computed`, and of those behind it that fit beside it."""
        held = sum(wave.most for wave in self.waves[computed : self._fetched])
        for number in range(self._fetched, len(self.waves)):
            wave = self.waves[number]
            held += wave.most
            if number > computed and held > self.slots:
                break
            self._coming.append(fetch_experts(self.transport, wave.wanted, self.packed) if wave.most else [])
            self._fetched += 1

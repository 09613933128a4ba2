"""A tier in memory that the device's copy engines reach: pinned host memory, another GPU's memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from . import OffloadError, TierFull
from .copies import Arrival, Copies, Mark, is_past
from .pool import Place, Pool
from .sizes import GRAIN


class Memory(Protocol):
    """A region of bytes beside the device."""

    capacity: int

    def reach(self, end: int) -> None:
        """Make sure that bytes 0 .. end can be used. Raises TierFull."""
        ...

    def check(self) -> None:
        """Raise OffloadError if the region is gone."""
        ...

    def write(self, offset: int, source: Tensor) -> None:
        """Copy uint8 [n] to offset .. offset + n, on the current stream."""
        ...

    def read(self, offset: int, target: Tensor) -> None:
        """Fill uint8 [n] from there."""
        ...

    def describe(self) -> str:
        """See `Tier`."""
        ...

    def close(self) -> None:
        """Give the region back; nothing uses it any more."""
        ...


class MemoryTier:
    """See `Tier`."""

    def __init__(self, name: str, memory: Memory, copies: Copies, remedy: str) -> None:
        """`remedy`: what helps when it is full."""
        self.name, self.capacity = name, memory.capacity
        self.memory, self.copies = memory, copies
        self._pool, self._remedy = Pool(memory.capacity, GRAIN), remedy
        self._left: Mark = None
        """Behind the last copy from a place that was given back before the copy's end."""

    @property
    def used(self) -> int:
        """See `Tier`."""
        return self._pool.used

    @property
    def peak(self) -> int:
        """See `Tier`."""
        return self._pool.peak

    def put(self, source: Tensor) -> MemoryParcel:
        """See `Tier`."""
        self.memory.check()
        place = self._take(len(source))
        copy = lambda: self.memory.write(place.offset, source)  # noqa: E731
        return MemoryParcel(self, place, source, self.copies.out(copy, self.copies.mark(), self._left))

    def give(self, place: Place, behind: Mark) -> None:
        """Give a parcel's place back, which the last copy from it leaves at `behind`."""
        if behind is not None:
            self._left = behind  # copies in keep their order
        self._pool.give(place)

    def describe(self) -> str:
        """See `Tier`."""
        return self.memory.describe()

    def close(self) -> None:
        """See `Tier`."""
        self.copies.finish()
        self.memory.close()

    def _take(self, nbytes: int) -> Place:
        try:
            place = self._pool.take(nbytes)
        except TierFull as error:
            raise TierFull(f"the {self.name} tier is full: {error}; {self._remedy}") from error
        try:
            self.memory.reach(place.end)
        except OffloadError:
            self._pool.give(place)
            raise
        return place


class MemoryParcel:
    """See `Parcel`."""

    def __init__(self, tier: MemoryTier, place: Place, source: Tensor, stored: Mark) -> None:
        self.nbytes, self.tier = place.nbytes, tier.name
        self._tier, self._place, self._length = tier, place, len(source)
        self._source: Tensor | None = source  # until it may be freed
        self._stored = stored
        self._arrival: Arrival | None = None
        self._arrived: Mark = None
        self._freed = False

    def wait_stored(self) -> None:
        """See `Parcel`."""
        self._tier.copies.hold(self._stored)
        self._source = None

    def is_stored(self) -> bool:
        """See `Parcel`."""
        past = is_past(self._stored)
        if past:
            self._source = None
        return past

    def fetch(self) -> None:
        """See `Parcel`."""
        assert not self._freed, "the parcel was given back"
        if self._arrival is not None:
            return
        memory, copies, place = self._tier.memory, self._tier.copies, self._place
        memory.check()
        arrival = Arrival(self._length, copies)
        target = arrival.target
        assert target is not None
        self._arrived = copies.into(lambda: memory.read(place.offset, target), arrival.ready, self._stored)
        self._arrival = arrival

    def take(self) -> Tensor:
        """See `Parcel`."""
        self.fetch()
        assert self._arrival is not None
        self._tier.memory.check()
        arrival, self._arrival = self._arrival, None
        return arrival.take(self._arrived)

    def free(self) -> None:
        """See `Parcel`."""
        if self._freed:
            return
        self._freed, self._source = True, None
        if self._arrival is not None:
            self._arrival.drop(self._arrived)
            self._arrival = None
        self._tier.give(self._place, self._arrived)

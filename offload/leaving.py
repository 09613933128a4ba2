"""The window of bytes on their way from the device to a tier."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .entry import Entry, Stored
from .ledger import Ledger


class Leaving:
    """Entries that are being copied out, and memory that must outlive its entry because it still is.

    When the window is full the compute stream waits for the oldest copy. In a backward it waits for none:
    what was saved last is needed first, and is the last to be copied.
    """

    def __init__(self, ledger: Ledger, window: int) -> None:
        """`window`: bytes."""
        self._ledger, self._window = ledger, window
        self._entries: dict[Entry, None] = {}  # the oldest copy first
        self._orphans: list[_Orphan] = []  # the oldest copy last, as backward gives them up
        self._bytes = 0

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def add(self, entry: Entry) -> None:
        """An entry whose copy has been started."""
        self._entries[entry] = None
        self._bytes += entry.sent
        while self._bytes > self._window and self._orphans:
            self._end(self._orphans.pop())
        # The newest has only just started: waiting for it would hide nothing of its copy.
        while self._bytes > self._window and len(self._entries) > 1:
            self._let_go(next(iter(self._entries)))

    def stay(self, entry: Entry) -> None:
        """Let an entry be used as it is, if it is in the window."""
        if entry in self._entries:
            del self._entries[entry]
            self._bytes -= entry.sent

    def release(self) -> None:
        """Give up the memory of what has been copied by now."""
        self.settle()
        for entry in list(self._entries):
            assert entry.parcel is not None
            if not entry.parcel.is_stored():
                break
            self._let_go(entry)

    def outlive(self, parcel: Stored, content: Tensor, place: str) -> None:
        """An entry is gone, and its memory, which the ledger counts at `place`, may still be being copied."""
        self._orphans.append(_Orphan(parcel, content, place))
        self._bytes += content.numel()
        self.settle()

    def settle(self) -> None:
        """Give up memory whose entry is gone and whose copy has ended."""
        while self._orphans and self._orphans[-1].parcel.is_stored():
            self._end(self._orphans.pop())

    def clear(self) -> None:
        """Forget the entries; what is still being copied is waited for."""
        self._entries.clear()
        while self._orphans:
            self._end(self._orphans.pop())
        self._bytes = 0

    def _let_go(self, entry: Entry) -> None:
        self.stay(entry)
        entry.leave()

    def _end(self, orphan: _Orphan) -> None:
        orphan.parcel.wait_stored()
        orphan.parcel.free()
        self._bytes -= orphan.content.numel()
        self._ledger.add(orphan.place, -orphan.content.numel())


class _Orphan(NamedTuple):
    parcel: Stored
    content: Tensor
    place: str

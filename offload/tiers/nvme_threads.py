"""The threads of the NVMe tier: one copies pieces from the device into buffers, one writes them, two read.

Each parcel is cut into pieces; a piece is a sealed block of the file and fits a buffer. The threads hold no
more of a parcel's source or target than they need, so that device memory is free when the tier's user
thinks so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from torch import Tensor

from ..files.alignment import ALIGNMENT, round_up
from ..files.engine import FileEngine, Transfer
from ..files.sealed import seal, verify
from . import OffloadError
from .copies import Mark, wait

if TYPE_CHECKING:
    from .nvme import Fetch, NvmeParcel, NvmeTier

READERS = 2
"""One brings a piece on while the other waits for the disk."""


@dataclass(eq=False)
class Piece:
    """Bytes start .. start + length of a parcel, and the block of the file that they are in."""

    start: int
    length: int
    offset: int
    checksum: int = 0
    kept: Tensor | None = None
    """The payload, once the file could not take it."""

    @property
    def nbytes(self) -> int:
        """Of the block."""
        return ALIGNMENT + round_up(self.length)


@dataclass(eq=False)
class _Moving:
    """A piece in a buffer."""

    parcel: NvmeParcel
    piece: Piece
    buffer: Tensor
    mark: Mark = None
    transfer: Transfer | None = None

    @property
    def block(self) -> Tensor:
        """The part of the buffer that is, or will be, in the file."""
        return self.buffer[: self.piece.nbytes]

    @property
    def payload(self) -> Tensor:
        """The bytes of the parcel."""
        return self.buffer[ALIGNMENT : ALIGNMENT + self.piece.length]


class Writer:
    """Two threads: from the device into buffers, from buffers into the file."""

    def __init__(self, tier: NvmeTier, buffers: Sequence[Tensor]) -> None:
        self._tier = tier
        self._parcels: SimpleQueue[NvmeParcel | None] = SimpleQueue()
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._copied: SimpleQueue[_Moving | NvmeParcel | None] = SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._threads = [
            threading.Thread(target=loop, name=f"nvme-{name}", daemon=True)
            for name, loop in (("copy", self._copy_all), ("write", self._write_all))
        ]
        for thread in self._threads:
            thread.start()

    def store(self, parcel: NvmeParcel) -> None:
        """Queue a parcel."""
        self._parcels.put(parcel)

    def stop(self) -> None:
        """End both threads when what is queued is done."""
        self._parcels.put(None)
        for thread in self._threads:
            thread.join()

    def _copy_all(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            try:
                mark = self._copy(parcel)
            except Exception as error:
                parcel.error = OffloadError(f"a copy to the nvme tier failed: {error}")
                parcel.copied.set_exception(parcel.error)
            else:
                parcel.copied.set_result(mark)
            self._copied.put(parcel)
            del parcel
        self._copied.put(None)

    def _copy(self, parcel: NvmeParcel) -> Mark:
        """Copy the pieces of a parcel into buffers; holds nothing of the source afterwards."""
        mark: Mark = None
        for piece in parcel.pieces:
            buffer = self._free.get()
            source = parcel.source
            if parcel.freed or source is None:
                self._free.put(buffer)
                break
            moving = _Moving(parcel, piece, buffer)
            part = source[piece.start : piece.start + piece.length]
            mark = self._tier.copies.out(_copying(moving.payload, part), parcel.ready)
            moving.mark = mark
            self._copied.put(moving)
        return mark

    def _write_all(self) -> None:
        flying: deque[_Moving | NvmeParcel] = deque()
        while True:
            try:
                item = self._copied.get(block=not flying)
            except Empty:
                self._finish(flying.popleft())
                continue
            if item is None:
                break
            if isinstance(item, _Moving):
                try:
                    self._start(item)
                except Exception as error:
                    item.parcel.error = OffloadError(f"a copy to the nvme tier failed: {error}")
            flying.append(item)
            # The copying thread may be waiting for a buffer, which only the oldest write gives back.
            while flying and _is_over(flying[0]):
                self._finish(flying.popleft())
            del item
        while flying:
            self._finish(flying.popleft())

    def _start(self, moving: _Moving) -> None:
        tier, parcel, piece = self._tier, moving.parcel, moving.piece
        wait(moving.mark)
        if parcel.freed:
            return
        if tier.failure is not None:
            self._keep(moving, tier.failure)
            return
        piece.checksum = seal(moving.block, tier.token, piece.offset, parcel.generation, piece.length)
        try:
            moving.transfer = tier.engine.write(tier.file, piece.offset, moving.block)
        except OSError as error:
            self._keep(moving, tier.fail(error))

    def _finish(self, item: _Moving | NvmeParcel) -> None:
        if not isinstance(item, _Moving):
            item.written.set()
            item.job_done()
            return
        try:
            if item.transfer is not None:
                item.transfer.wait()
        except OSError as error:
            self._keep(item, self._tier.fail(error))
        self._free.put(item.buffer)

    def _keep(self, moving: _Moving, error: OffloadError) -> None:
        if self._tier.keep_failed:
            moving.piece.kept = moving.payload.clone()
        else:
            moving.parcel.error = error


class Reader:
    """One thread: from the file into buffers, verified, and to the device. Brings every READERS-th piece."""

    def __init__(self, tier: NvmeTier, number: int, engine: FileEngine, buffers: Sequence[Tensor]) -> None:
        self._tier, self._number, self._engine = tier, number, engine
        self._fetches: SimpleQueue[Fetch | None] = SimpleQueue()
        self._free = deque(buffers)
        self._reading: deque[tuple[Fetch, _Moving]] = deque()
        self._leaving: deque[_Moving] = deque()  # copies to the device
        self._thread = threading.Thread(target=self._read_all, name=f"nvme-read-{number}", daemon=True)
        self._thread.start()

    def bring(self, fetch: Fetch) -> None:
        """Queue a fetch."""
        self._fetches.put(fetch)

    def stop(self) -> None:
        """End the thread when what is queued is done."""
        self._fetches.put(None)
        self._thread.join()

    def _read_all(self) -> None:
        while True:
            try:
                fetch = self._fetches.get(block=not self._reading)
            except Empty:
                self._deliver()
                continue
            if fetch is None:
                break
            self._read(fetch)
            del fetch
        while self._reading:
            self._deliver()

    def _read(self, fetch: Fetch) -> None:
        parcel = fetch.parcel
        while not parcel.written.is_set() and self._reading:
            self._deliver()
        parcel.written.wait()
        # Small parcels of one piece go to the readers in turn, too.
        for piece in parcel.pieces[(self._number - parcel.generation) % READERS :: READERS]:
            moving = _Moving(parcel, piece, self._buffer())
            if parcel.error is None and piece.kept is None and not parcel.freed:
                try:
                    moving.transfer = self._engine.read(self._tier.file, piece.offset, moving.block)
                except OSError as error:
                    parcel.error = self._lost(error)
            self._reading.append((fetch, moving))

    def _buffer(self) -> Tensor:
        """A free buffer. As few reads as possible are waited for: the disk always has enough to do."""
        if self._free:
            return self._free.popleft()
        if not self._leaving:
            self._deliver()
        oldest = self._leaving.popleft()
        wait(oldest.mark)
        return oldest.buffer

    def _deliver(self) -> None:
        """Wait for the oldest read, and start its copy to the device."""
        fetch, moving = self._reading.popleft()
        try:
            self._copy(fetch, moving)
        except OSError as error:
            fetch.parcel.error = self._lost(error)
        except Exception as error:
            fetch.parcel.error = OffloadError(f"a copy from the nvme tier failed: {error}")
        self._leaving.append(moving)
        fetch.piece_done()

    def _copy(self, fetch: Fetch, moving: _Moving) -> None:
        tier, parcel, piece = self._tier, moving.parcel, moving.piece
        if moving.transfer is not None:
            moving.transfer.wait()
        if parcel.error is not None or parcel.freed:
            return
        if piece.kept is not None:
            moving.payload.copy_(piece.kept)
        else:
            name = f"bytes {piece.start} .. {piece.start + piece.length} of a parcel"
            what = tier.token, piece.offset, parcel.generation, piece.length, piece.checksum
            verify(moving.block, *what, name)
        moving.mark = fetch.bring(piece.start, moving.payload)

    def _lost(self, error: OSError) -> OffloadError:
        return OffloadError(
            f"saved activations in {self._tier.folder} could not be read back: {reason(error)}; set "
            "offload.nvme_dir to another disk, or an offload.policy without nvme, and start the run again "
            "from its last checkpoint"
        )


def _copying(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _is_over(item: _Moving | NvmeParcel) -> bool:
    """Whether nothing is under way for it: it was skipped or kept, or is the end of a parcel."""
    return not isinstance(item, _Moving) or item.transfer is None


def reason(error: OSError) -> str:
    return error.strerror or str(error)

"""A preallocated, nameless file on a disk, through a few pinned buffers.

A parcel is cut into pieces, each a sealed block of the file. Threads (`nvme_threads.py`) work beside the
computation: one copies pieces from the device into free buffers, one seals and writes them, two read ahead,
verify and copy pieces to the device; several reads and writes are under way at a time. When the disk is
slower than the device, the buffers are full and `wait_stored` is where the host waits.

The first failed write gives the file up: what is on the way to it stays in plain host memory if
`keep_failed`, later `put`s are refused. What cannot be read back is lost, and an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from ..files.alignment import ALIGNMENT, round_up
from ..files.engine import FileEngine, new_engine
from . import OffloadError, TierFull
from .copies import Arrival, Copies, Mark, is_past, wait
from .host import HostMemory
from .nvme_threads import READERS, Piece, Reader, Writer, reason
from .pool import Place, Pool
from .sizes import PIECE

BUFFERS = 8
"""Of a piece each, in each direction."""
REMEDY = "raise offload.nvme_gb, or let less go to the disk (offload.sites)"


class NvmeTier:
    """See `Tier`."""

    name = "nvme"

    def __init__(
        self,
        folder: Path,
        capacity: int,
        device: torch.device,
        *,
        keep_failed: bool = True,
        engine: Callable[[], FileEngine] = new_engine,
        piece: int = PIECE,
        buffers: int = BUFFERS,
    ) -> None:
        """Raises OffloadError if the folder or the disk does not allow it."""
        self.folder, self.capacity, self.piece, self.copies = folder, capacity, piece, Copies(device)
        self.keep_failed = keep_failed
        self._pool = Pool(capacity, ALIGNMENT)
        self.used = self.peak = 0
        """A freed parcel does not count, even while its place is still read or written."""
        self._leaving, self._change = 0, threading.Condition()
        self.engine = engine()
        self.file = self._open(capacity)
        self.failure: OffloadError | None = None
        self.token = secrets.token_bytes(16)
        self.generations = itertools.count(1)
        room = 2 * buffers * (ALIGNMENT + piece)
        self._staging = HostMemory(room, device, slab=room)
        self._staging.reach(room)
        memory = self._staging.bytes.split(ALIGNMENT + piece)
        self.writer = Writer(self, memory[:buffers])
        self.readers = [
            Reader(self, number, engine(), memory[buffers + number :: READERS]) for number in range(READERS)
        ]

    def put(self, source: Tensor) -> NvmeParcel:
        """See `Tier`."""
        assert len(source), "an empty parcel"
        if self.failure is not None:
            raise self.failure
        pieces = -(-len(source) // self.piece)
        place = self._take(round_up(len(source)) + pieces * ALIGNMENT)
        self.used += place.nbytes
        self.peak = max(self.peak, self.used)
        parcel = NvmeParcel(self, place, source)
        self.writer.store(parcel)
        return parcel

    def leave(self, parcels: int) -> None:
        """So many parcels more are freed, but are still read or written."""
        with self._change:
            self._leaving += parcels
            self._change.notify_all()

    def give(self, place: Place) -> None:
        """Give a parcel's place back, which nothing reads or writes any more."""
        self._pool.give(place)

    def fail(self, error: OSError) -> OffloadError:
        """Give the file up for what is written from now on."""
        if self.failure is None:
            self.failure = OffloadError(f"the disk under {self.folder} failed: {reason(error)}; {_FREE}")
        return self.failure

    def describe(self) -> str:
        """See `Tier`."""
        cache = "" if _is_direct(self.file) else ", through the page cache"
        name = type(self.engine).__name__
        return f"{self.capacity / 1e9:.2f} GB of a file in {self.folder} by {name}{cache}"

    def close(self) -> None:
        """See `Tier`."""
        self.writer.stop()
        for reader in self.readers:
            reader.stop()
        self.copies.finish()
        self._staging.close()
        with contextlib.suppress(OSError):
            self.engine.close(self.file)

    def _take(self, nbytes: int) -> Place:
        """A place, if need be one that a freed parcel is about to leave. Raises TierFull."""
        while True:
            with self._change:
                leaving = self._leaving
            try:
                return self._pool.take(nbytes)
            except TierFull as error:
                if leaving == 0:
                    raise TierFull(f"the nvme tier is full: {error}; {REMEDY}") from error
            with self._change:
                while self._leaving == leaving:
                    self._change.wait()

    def _open(self, capacity: int) -> int:
        try:
            self.folder.mkdir(exist_ok=True)
            file = self.engine.open(self.folder)
        except OSError as error:
            raise OffloadError(f"no file can be made in {self.folder}: {reason(error)}; {_OTHER}") from error
        try:
            os.posix_fallocate(file, 0, round_up(capacity))
        except OSError as error:
            os.close(file)
            size = f"{capacity / 1e9:.2f} GB"
            raise OffloadError(
                f"{self.folder} has no room for {size}: {reason(error)}; lower offload.nvme_gb, {_FREE}"
            ) from error
        return file


_FREE = "free some, or set offload.nvme_dir to another disk"
_OTHER = "set offload.nvme_dir to a folder on a fast local disk that this user may write to"


class NvmeParcel:
    """See `Parcel`."""

    tier = "nvme"

    def __init__(self, tier: NvmeTier, place: Place, source: Tensor) -> None:
        self.nbytes, self.length = place.nbytes, len(source)
        self.generation = next(tier.generations)
        self.source: Tensor | None = source
        self.ready = tier.copies.mark()
        self.pieces = [
            Piece(
                start, min(tier.piece, len(source) - start), place.offset + index * (ALIGNMENT + tier.piece)
            )
            for index, start in enumerate(range(0, len(source), tier.piece))
        ]
        self.copied: Future[Mark] = Future()
        self.written = threading.Event()
        self.error: OffloadError | None = None
        self.freed = False
        self._tier, self._place = tier, place
        self._lock = threading.Lock()
        self._jobs = 1  # being stored, being fetched
        self._fetch: Fetch | None = None

    def wait_stored(self) -> None:
        """See `Parcel`."""
        mark = self.copied.result()
        self._tier.copies.hold(mark)
        self.source = None

    def is_stored(self) -> bool:
        """See `Parcel`."""
        past = self.copied.done() and is_past(self.copied.result())
        if past:
            self.source = None
        return past

    def fetch(self) -> None:
        """See `Parcel`."""
        assert not self.freed, "the parcel was given back"
        if self._fetch is None:
            self._fetch = Fetch(self, Arrival(self.length, self._tier.copies), self._tier.copies)
            with self._lock:
                self._jobs += 1
            for reader in self._tier.readers:
                reader.bring(self._fetch)

    def take(self) -> Tensor:
        """See `Parcel`."""
        self.fetch()
        assert self._fetch is not None
        fetch, self._fetch = self._fetch, None
        try:
            return fetch.arrival.take(fetch.done.result())
        except OffloadError:
            fetch.drop()
            raise

    def free(self) -> None:
        """See `Parcel`."""
        if self.freed:
            return
        if self._fetch is not None:
            self._fetch.drop()
            self._fetch = None
        self._tier.used -= self.nbytes
        with self._lock:
            self.freed = True
            busy = self._jobs > 0
            if busy:
                self._tier.leave(1)
        if not busy:
            self._tier.give(self._place)

    def job_done(self) -> None:
        """A freed parcel leaves its place when the last job that uses it ends."""
        with self._lock:
            self._jobs -= 1
            over = self.freed and self._jobs == 0
        if over:
            self.source = None
            self._tier.give(self._place)
            self._tier.leave(-1)


class Fetch:
    """Bytes on their way back. Its pieces are brought by several threads."""

    def __init__(self, parcel: NvmeParcel, arrival: Arrival, copies: Copies) -> None:
        self.parcel, self.arrival = parcel, arrival
        self.done: Future[Mark] = Future()
        self._copies, self._left = copies, len(parcel.pieces)
        self._mark: Mark = None
        self._lock = threading.Lock()
        self._dropped = False

    def bring(self, start: int, payload: Tensor) -> Mark:
        """Start to copy a piece of the parcel, which begins at `start`, to the device."""
        with self._lock:  # the last mark is behind all copies
            target = self.arrival.target
            assert target is not None
            part = target[start : start + len(payload)]
            self._mark = self._copies.into(lambda: part.copy_(payload, non_blocking=True), self.arrival.ready)
            return self._mark

    def piece_done(self) -> None:
        """One piece more is on its way on the copy stream, or failed, or is not wanted."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
            if self._dropped:
                wait(self._mark)
                self.arrival.target = None
            if self.parcel.error is not None:
                self.done.set_exception(self.parcel.error)
            else:
                self.done.set_result(self._mark)
        self.parcel.job_done()

    def drop(self) -> None:
        """Nobody wants them any more."""
        with self._lock:
            self._dropped = True
            if self.done.done():
                self.arrival.drop(self._mark)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)

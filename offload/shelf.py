"""FP32 vectors by key, on one tier below the device: host memory, or a file with a few buffers before it.

A vector is used where it lies on the host: `open` gives it to read and change, `blank` gives room for a new
value, and then `commit` keeps it or `release` leaves the old one. A shelf is used by one thread at a time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .errors import OffloadError
from .files.alignment import ALIGNMENT, round_up
from .files.engine import FileEngine, Transfer, aligned_bytes
from .files.sealed import seal, verify

BUFFERS = 4
"""One in use, one about to be, one being read ahead, one being written."""


class Shelf(Protocol):
    """Keeps FP32 vectors."""

    def reserve(self, key: Hashable, numel: int) -> None:
        """Make room for a vector."""
        ...

    def request(self, key: Hashable) -> None:
        """`open` of it will follow soon."""
        ...

    def open(self, key: Hashable) -> Tensor:
        """The vector, FP32 [numel] on the host. Raises OffloadError if it cannot be had again."""
        ...

    def blank(self, key: Hashable) -> Tensor:
        """Room for the vector's new value, its content unspecified."""
        ...

    def commit(self, key: Hashable) -> None:
        """Keep what stands in what `open` or `blank` gave, which must not be touched any more."""
        ...

    def release(self, key: Hashable) -> None:
        """Done with what `open` gave; it was not changed."""
        ...

    def flush(self) -> None:
        """Return when everything is where it belongs."""
        ...


class HostShelf:
    """Vectors in host memory, pinned where a GPU will read them."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._vectors: dict[Hashable, Tensor] = {}

    def reserve(self, key: Hashable, numel: int) -> None:
        """See `Shelf`."""
        self._vectors[key] = torch.zeros(numel, dtype=torch.float32, pin_memory=self._pinned)

    def request(self, key: Hashable) -> None:
        """See `Shelf`."""

    def open(self, key: Hashable) -> Tensor:
        """See `Shelf`."""
        return self._vectors[key]

    def blank(self, key: Hashable) -> Tensor:
        """See `Shelf`."""
        return self._vectors[key]

    def commit(self, key: Hashable) -> None:
        """See `Shelf`."""

    def release(self, key: Hashable) -> None:
        """See `Shelf`."""

    def flush(self) -> None:
        """See `Shelf`."""


@dataclass
class _Entry:
    offset: int
    numel: int
    generation: int = 0
    """Times that it has been written; 0: never."""
    checksum: int = 0
    host: Tensor | None = None
    """The vector, once the file could not take it."""

    @property
    def nbytes(self) -> int:
        """In the file, with its header."""
        return ALIGNMENT + round_up(4 * self.numel)


@dataclass(eq=False)
class _Buffer:
    memory: Tensor
    key: Hashable = None
    transfer: Transfer | None = None
    is_write: bool = False
    held: bool = False
    """Between `open` or `blank` and `commit` or `release`."""


class FileShelf:
    """Vectors in a nameless file, through a few aligned buffers.

    What a failed write was to keep stays in host memory, with one warning, if `fallback`; what cannot be read
    back is lost, and an error. Each vector carries the shelf's random token, its place, a generation and a
    checksum, which must be those of the last commit.
    """

    def __init__(
        self,
        folder: Path,
        engine: FileEngine,
        *,
        pinned: bool,
        fallback: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._folder, self._engine, self._pinned = folder, engine, pinned
        self._fallback, self._warn = fallback, warn
        self._token = secrets.token_bytes(16)
        self._entries: dict[Hashable, _Entry] = {}
        self._buffers: list[_Buffer] = []
        self._end = 0
        self._file: int | None = None
        self._failed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = engine.open(folder)
        except OSError as error:
            self._fail(error)

    def reserve(self, key: Hashable, numel: int) -> None:
        """See `Shelf`. Raises OffloadError if the disk has no room and nothing may take over."""
        assert not self._buffers, "all vectors are announced before the first is used"
        entry = _Entry(self._end, numel)
        self._entries[key] = entry
        self._end += entry.nbytes
        if not self._failed:
            assert self._file is not None
            try:
                os.posix_fallocate(self._file, entry.offset, entry.nbytes)
            except OSError as error:
                self._fail(error)

    def request(self, key: Hashable) -> None:
        """See `Shelf`."""
        entry = self._entries[key]
        if entry.host is None and entry.generation and self._buffer(key) is None:
            self._start_reading(key, entry)

    def open(self, key: Hashable) -> Tensor:
        """See `Shelf`."""
        entry = self._entries[key]
        assert entry.generation, f"{key} was never written"
        if entry.host is not None:
            return entry.host
        buffer = self._buffer(key) or self._start_reading(key, entry)
        was_read = buffer.transfer is not None and not buffer.is_write
        try:
            self._finish(buffer)
            if was_read:
                self._verify(key, entry, buffer.memory)
        except OSError as error:
            raise OffloadError(
                f"a vector in {self._folder} could not be read back: {error}; set offload.nvme_dir to "
                "another disk, or keep it in host memory; the last checkpoint is intact"
            ) from error
        if entry.host is not None:
            return entry.host
        buffer.held = True
        return _vector(buffer.memory, entry)

    def blank(self, key: Hashable) -> Tensor:
        """See `Shelf`."""
        entry = self._entries[key]
        if entry.host is not None:
            return entry.host
        buffer = self._buffer(key) or self._take(key)
        self._finish(buffer)
        if entry.host is not None:
            return entry.host
        buffer.held = True
        return _vector(buffer.memory, entry)

    def commit(self, key: Hashable) -> None:
        """See `Shelf`."""
        entry = self._entries[key]
        entry.generation += 1
        if entry.host is not None:
            return
        buffer = self._buffer(key)
        assert buffer is not None and buffer.held, f"{key} is not open"
        buffer.held = False
        if self._failed:
            self._keep_on_host(buffer)
            return
        block = buffer.memory[: entry.nbytes]
        entry.checksum = seal(block, self._token, entry.offset, entry.generation, entry.numel)
        assert self._file is not None
        try:
            buffer.transfer = self._engine.write(self._file, entry.offset, block)
            buffer.is_write = True
        except OSError as error:
            self._fail(error)
            self._keep_on_host(buffer)

    def release(self, key: Hashable) -> None:
        """See `Shelf`."""
        buffer = self._buffer(key)
        if buffer is not None:
            buffer.held = False

    def flush(self) -> None:
        """See `Shelf`."""
        for buffer in list(self._buffers):
            if buffer.is_write:
                self._finish(buffer)

    def _verify(self, key: Hashable, entry: _Entry, memory: Tensor) -> None:
        """Raise OSError unless a buffer holds what was committed last."""
        what = self._token, entry.offset, entry.generation, entry.numel, entry.checksum
        verify(memory[: entry.nbytes], *what, str(key))

    def _buffer(self, key: Hashable) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.key == key), None)

    def _take(self, key: Hashable) -> _Buffer:
        """A buffer for a vector: a new one while there may be more, else the one used longest ago."""
        if len(self._buffers) < BUFFERS:
            largest = max(entry.nbytes for entry in self._entries.values())
            self._buffers.append(_Buffer(aligned_bytes(largest, pinned=self._pinned)))
        else:
            free = [buffer for buffer in self._buffers if not buffer.held]
            assert free, "every buffer is open"
            done = [buffer for buffer in free if buffer.transfer is None] or free
            self._buffers.remove(done[0])
            self._buffers.append(done[0])
            if done[0].is_write:
                self._finish(done[0])
            elif done[0].transfer is not None:
                done[0].transfer.wait()
        buffer = self._buffers[-1]
        buffer.key, buffer.transfer, buffer.is_write = key, None, False
        return buffer

    def _start_reading(self, key: Hashable, entry: _Entry) -> _Buffer:
        buffer = self._take(key)
        assert self._file is not None
        try:
            buffer.transfer = self._engine.read(self._file, entry.offset, buffer.memory[: entry.nbytes])
        except OSError as error:
            buffer.transfer = _Failed(error)
        return buffer

    def _finish(self, buffer: _Buffer) -> None:
        """Wait for a buffer's transfer. A failed write leaves the vector in host memory."""
        transfer, buffer.transfer = buffer.transfer, None
        if transfer is None:
            return
        was_write, buffer.is_write = buffer.is_write, False
        try:
            transfer.wait()
        except OSError as error:
            if not was_write:
                buffer.key = None
                raise
            self._fail(error)
            self._keep_on_host(buffer)

    def _keep_on_host(self, buffer: _Buffer) -> None:
        """The buffer becomes the vector's home; its place in the pool gets new memory."""
        entry = self._entries[buffer.key]
        entry.host = _vector(buffer.memory, entry)
        buffer.memory = aligned_bytes(len(buffer.memory), pinned=self._pinned)
        buffer.key = None

    def _fail(self, error: OSError) -> None:
        """Give up the file for what is written from now on."""
        problem = f"the disk under {self._folder} failed: {error.strerror or error}"
        if not self._fallback:
            raise OffloadError(f"{problem}; free it, or set offload.nvme_dir or offload.on_failure=fallback")
        if not self._failed:
            self._warn(f"{problem}; what would go there stays in host memory from now on")
        self._failed = True


class _Failed:
    """A transfer that could not be started."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def wait(self) -> None:
        """See `Transfer`."""
        raise self._error


def _vector(memory: Tensor, entry: _Entry) -> Tensor:
    return memory[ALIGNMENT : ALIGNMENT + 4 * entry.numel].view(torch.float32)

"""Reads and writes large pieces of files beside the computation.

Two engines: threads with ordinary calls, which run everywhere, and DeepSpeed's DeepNVMe (`deepnvme.py`).
Memory is given as uint8 tensors on the host whose address and size are multiples of `ALIGNMENT`, so that the
page cache can be bypassed where the file system allows it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .alignment import ALIGNMENT, round_up

BLOCK = 8 << 20
"""Bytes of one request: large enough for a disk's full rate, small enough to keep several under way."""
THREADS = 4


class Transfer(Protocol):
    """A read or write that has been started."""

    def wait(self) -> None:
        """Return when it is done. Raises OSError as a plain call would."""
        ...


class FileEngine(Protocol):
    """Moves bytes between files and host memory."""

    def open(self, folder: Path) -> int:
        """A descriptor of a new, empty file without a name: it goes with the process. Raises OSError."""
        ...

    def write(self, file: int, offset: int, memory: Tensor) -> Transfer:
        """Start to write uint8 `memory`, which must stay as it is until the transfer is done."""
        ...

    def read(self, file: int, offset: int, memory: Tensor) -> Transfer:
        """Start to fill uint8 `memory`."""
        ...

    def close(self, file: int) -> None:
        """Close a descriptor."""
        ...


def aligned_bytes(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Host memory, uint8 [nbytes], that starts at a multiple of `ALIGNMENT`."""
    whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + nbytes]


class ThreadEngine:
    """Requests of `BLOCK` bytes on a few threads; the calls release Python's lock."""

    def __init__(self, *, direct: bool = True, threads: int = THREADS) -> None:
        """`direct`: bypass the page cache where the file system allows it."""
        self.direct = direct
        self._pool = ThreadPoolExecutor(threads, "file")

    def open(self, folder: Path) -> int:
        """See `FileEngine`."""
        for direct in (os.O_DIRECT, 0) if self.direct else (0,):
            with contextlib.suppress(OSError):
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | direct, 0o600)
        return self._open_named(folder)

    def _open_named(self, folder: Path) -> int:
        """For file systems that make no file without a name: it has one for a moment."""
        file, path = tempfile.mkstemp(prefix="offload-", dir=folder)
        direct = None
        if self.direct:
            with contextlib.suppress(OSError):
                direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        os.unlink(path)
        if direct is None:
            return file
        os.close(file)
        return direct

    def write(self, file: int, offset: int, memory: Tensor) -> Transfer:
        """See `FileEngine`."""
        return self._start(_write_all, file, offset, memory)

    def read(self, file: int, offset: int, memory: Tensor) -> Transfer:
        """See `FileEngine`."""
        return self._start(_read_all, file, offset, memory)

    def close(self, file: int) -> None:
        """See `FileEngine`."""
        os.close(file)

    def _start(
        self, call: Callable[[int, int, memoryview], None], file: int, offset: int, memory: Tensor
    ) -> Transfer:
        view = memoryview(memory.numpy())
        # Even parts: a small rest would cost as much time as a whole request.
        part = round_up(-(-len(view) // max(1, round(len(view) / BLOCK))))
        return _Futures(
            [
                self._pool.submit(call, file, offset + start, view[start : start + part])
                for start in range(0, len(view), part)
            ]
        )


class _Futures:
    """All blocks of a request."""

    def __init__(self, futures: list[Future[None]]) -> None:
        self._futures = futures

    def wait(self) -> None:
        """Wait for all, then raise the first failure: memory is in use until the last one ends."""
        failures = [future.exception() for future in self._futures]
        for failure in failures:
            if failure is not None:
                raise failure


def _write_all(file: int, offset: int, view: memoryview) -> None:
    while view:
        written = os.pwrite(file, view, offset)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if written < len(view) and written % ALIGNMENT:
            # The rest would not be aligned; write the torn block again.
            written -= written % ALIGNMENT
            if written == 0:
                raise OSError(errno.EIO, "a write was cut short")
        view, offset = view[written:], offset + written


def _read_all(file: int, offset: int, view: memoryview) -> None:
    while view:
        read = os.preadv(file, [view], offset)
        if read == 0:
            raise OSError(errno.EIO, "the file is shorter than what was written to it")
        view, offset = view[read:], offset + read


def report() -> list[tuple[str, bool, str]]:
    """(engine, whether it can be used, why not) of each."""
    from .deepnvme import why_not

    reason = why_not()
    return [("deepnvme", reason is None, reason or ""), ("threads", True, "")]


def new_engine() -> FileEngine:
    """DeepNVMe where it is ready to use, else threads; for one thread, since DeepNVMe's handle is for one."""
    from .deepnvme import DeepNvmeEngine, why_not

    return ThreadEngine() if why_not() else DeepNvmeEngine()


_lock = threading.Lock()
_engine: FileEngine | None = None


def default_engine() -> FileEngine:
    """The engine of what this process keeps on shelves."""
    global _engine
    with _lock:
        if _engine is None:
            _engine = new_engine()
        return _engine

"""DeepSpeed's DeepNVMe as a file engine, where its extension has been built; it is never compiled here."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from .engine import ThreadEngine, Transfer

BLOCK, DEPTH, PARALLEL = 1 << 20, 32, 4


def why_not() -> str | None:
    """Why DeepNVMe cannot be used, or None."""
    try:
        _extension()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _extension() -> Any:
    """The module with `aio_handle`. Raises ImportError unless it was built when DeepSpeed was installed."""
    return importlib.import_module("deepspeed.ops.aio.async_io_op")


class DeepNvmeEngine:
    """One handle for all files. Its `wait` is for everything that it has started, so that a transfer that is
    waited for may find itself done already."""

    def __init__(self) -> None:
        self._handle = _extension().aio_handle(BLOCK, DEPTH, False, True, PARALLEL)
        self._files = ThreadEngine(direct=False, threads=1)

    def open(self, folder: Path) -> int:
        """See `FileEngine`."""
        return self._files.open(folder)

    def write(self, file: int, offset: int, memory: Tensor) -> Transfer:
        """See `FileEngine`."""
        _check(self._handle.async_pwrite(memory, _path(file), offset))
        return _Started(self._handle)

    def read(self, file: int, offset: int, memory: Tensor) -> Transfer:
        """See `FileEngine`."""
        if os.fstat(file).st_size < offset + memory.numel():
            raise OSError("the file is shorter than what was written to it")
        _check(self._handle.async_pread(memory, _path(file), offset))
        return _Started(self._handle)

    def close(self, file: int) -> None:
        """See `FileEngine`."""
        self._files.close(file)


class _Started:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def wait(self) -> None:
        """See `Transfer`."""
        _check(self._handle.wait())


def _path(file: int) -> str:
    """The extension opens files itself; this opens one that has no name any more."""
    return f"/proc/self/fd/{file}"


def _check(answer: int) -> None:
    if answer < 0:
        raise OSError(f"DeepNVMe answered {answer}")

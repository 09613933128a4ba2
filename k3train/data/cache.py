"""Where derived files are kept, and how one process at a time makes them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


def cache_folder(configured: str | None) -> Path:
    """`data.cache_dir`, else $K3TRAIN_CACHE, else ~/.cache/k3train; made if need be.

    Raises:
        UserError: the folder cannot be made or written.
    """
    folder = Path(configured or os.environ.get("K3TRAIN_CACHE") or "~/.cache/k3train").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_unwritable(folder, error.strerror)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(_unwritable(folder, "permission denied"))
    return folder


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when the process ends, however it ends.

    Raises:
        BlockingIOError: another process holds it and `wait` is off.
    """
    with path.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _unwritable(folder: Path, reason: str | None) -> str:
    return f"{folder} cannot be written ({reason}); set data.cache_dir or $K3TRAIN_CACHE to a folder that can"

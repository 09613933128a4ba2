"""Names and life of checkpoint folders: partial while written, renamed when complete and before removal."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..errors import UserError

_COMPLETE = re.compile(r"^step-(\d{8,})$")
PARTIAL, REMOVING = ".partial", ".removing"


def complete(root: Path, step: int) -> Path:
    """Folder of the complete checkpoint of a step."""
    return root / f"step-{step:08d}"


def partial(root: Path, step: int) -> Path:
    """Folder in which the checkpoint of a step is written."""
    return root / f"step-{step:08d}{PARTIAL}"


def available(root: Path) -> list[int]:
    """Steps of all complete checkpoints, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for entry in root.iterdir() if (match := _COMPLETE.match(entry.name)))


def remove(folder: Path) -> None:
    """Delete a checkpoint; it stops counting as complete before the first of its files goes."""
    leaving = folder.with_name(folder.name.split(".")[0] + REMOVING)
    shutil.rmtree(leaving, ignore_errors=True)
    os.rename(folder, leaving)
    shutil.rmtree(leaving)


def clean(root: Path) -> list[str]:
    """Remove what an interrupted save or removal left behind and return its names."""
    left = [entry for entry in root.iterdir() if entry.suffix in (PARTIAL, REMOVING)] if root.is_dir() else []
    for entry in left:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return sorted(entry.name for entry in left)


def publish(folder: Path, root: Path, step: int) -> Path:
    """Make a folder the complete checkpoint of a step; its path."""
    target = complete(root, step)
    if target.exists():
        remove(target)
    folder.rename(target)
    sync(root)
    return target


def surplus(steps: Iterable[int], keep: int, keep_every: int = 0) -> list[int]:
    """Of the steps that have checkpoints, those that need not stay, ascending.

    Args:
        keep: newest ones that stay; 0 keeps all.
        keep_every: multiples of it stay too; 0: none for that.
    """
    older = sorted(steps)[: -keep or None] if keep else []
    return [step for step in older if not keep_every or step % keep_every]


def prune(root: Path, keep: int, newest: int, keep_every: int = 0) -> None:
    """Of the complete checkpoints up to step `newest`, remove those that are `surplus`.

    Later ones were found damaged: they must not push out what can be loaded.
    """
    for step in surplus([step for step in available(root) if step <= newest], keep, keep_every):
        remove(complete(root, step))


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path, need_bytes: int) -> None:
    """Try to write in a folder, making it if necessary, and look at the space.

    Raises:
        UserError: it cannot be written, or has less than `need_bytes` free.
    """
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"k3train")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot write in {folder}: {reason}; set run.dir to a folder that you own"
        ) from error
    if free < need_bytes:
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB free and a checkpoint needs {need_bytes / 1e9:.1f} GB; "
            "free some space, set run.dir to another disk or lower checkpoint.keep"
        )


def unlock(descriptor: int | None) -> None:
    """Let others into what `lock_folder` kept them out of."""
    if descriptor is not None:
        os.close(descriptor)


def lock_folder(folder: Path) -> int | None:
    """Keep other runs out of a folder until this process ends, however it ends; the lock's descriptor.

    None on a file system without locks.

    Raises:
        UserError: another process holds the folder.
    """
    descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(f"{folder} is in use by a run that goes on; wait for it or set run.dir") from error
    except OSError:
        os.close(descriptor)
        return None
    return descriptor

"""Writes a folder file by file, several at a time: resumed when interrupted, published as a whole.

Everything is written under `TARGET.partial` and renamed at the end. A file that is done has a record with its
checksum; the same command, started again, keeps such files. What cannot succeed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

import torch

from ...errors import UserError
from ...log.progress import Progress
from .. import manifest
from ..folders import PARTIAL, check_writable, lock_folder, sync

RECORDS = ".records"
IDENTITY = "identity.json"
CONTINUE = "the same command continues"

Record = dict[str, Any]


class Job(Protocol):
    """What is written, from several threads."""

    def files(self) -> Sequence[str]:
        """Paths of all files of weights below the target, in the order in which they are written."""
        ...

    def write(self, index: int, path: Path) -> Record:
        """Write one of `files` to `path`; its size and SHA-256 as "checksum", and what else to remember."""
        ...


@contextlib.contextmanager
def building(target: Path, identity: dict[str, Any], need_bytes: int) -> Iterator[Path]:
    """A folder that becomes `target` when the block ends well, with what an interrupted call left in it.

    Args:
        identity: what has to be the same for an interrupted call to be continued.

    Raises:
        UserError: the target exists, cannot be written, or another process is at it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: exists; name another folder, or remove it")
    check_writable(target.parent, need_bytes)
    folder = target.with_name(target.name + PARTIAL)
    _prepare(folder, identity)
    lock = lock_folder(folder)
    try:
        yield folder
        shutil.rmtree(folder / RECORDS)
        (folder / ".lock").unlink(missing_ok=True)
        if target.exists():
            target.rmdir()
        folder.rename(target)
        sync(target.parent)
    except UserError:
        # The source or the request is at fault: another try would end as this one.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}; {CONTINUE} once that is mended") from error
    finally:
        if lock is not None:
            os.close(lock)


def _prepare(folder: Path, identity: dict[str, Any]) -> None:
    """Make the folder, empty unless it was begun with the same identity."""
    mark, text = folder / RECORDS / IDENTITY, json.dumps(identity, sort_keys=True)
    if folder.exists() and (not mark.is_file() or mark.read_text() != text):
        shutil.rmtree(folder)
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    mark.write_text(text)


def fill(job: Job, folder: Path, workers: int, progress: Progress) -> dict[str, Record]:
    """Write all files of a job that are not there yet; every file's record by its path.

    Raises:
        UserError: the source is at fault.
    """
    names = job.files()
    records = {name: record for name in names if (record := _kept(folder, name))}
    left = [index for index, name in enumerate(names) if name not in records]
    if records:
        progress.message(f"{len(records)} of {len(names)} files are there already")
    done = len(records)
    for index, record in _written(job, folder, left, workers):
        records[names[index]] = record
        done += 1
        progress.update(done)
    return records


def _written(job: Job, folder: Path, indices: list[int], workers: int) -> Iterator[tuple[int, Record]]:
    with in_threads(workers) as pool:
        futures = {pool.submit(_write, job, folder, index): index for index in indices}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextlib.contextmanager
def in_threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads of one computing thread each: reading, hashing and writing leave Python to the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _write(job: Job, folder: Path, index: int) -> Record:
    name = job.files()[index]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    record = job.write(index, unfinished)
    unfinished.rename(path)
    note = _record(folder, name)
    draft = note.with_suffix(".tmp")
    draft.write_text(json.dumps(record))
    draft.rename(note)
    return record


def _kept(folder: Path, name: str) -> Record | None:
    """The record of a file that an earlier call finished and that is still what it was."""
    try:
        record: Record = json.loads(_record(folder, name).read_text())
        if manifest.checksum(folder / name) == record["checksum"]:
            return record
    except (OSError, ValueError, KeyError):
        pass
    return None


def _record(folder: Path, name: str) -> Path:
    return folder / RECORDS / (hashlib.sha256(name.encode()).hexdigest()[:32] + ".json")


def bar(total: int) -> Progress:
    """A bar over files."""
    return Progress(total, unit="file")

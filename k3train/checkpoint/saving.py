"""A save's threads: one writes this rank's part, one carries it from the node's disk to the run's folder.

Neither takes part in a collective: ranks report in the folder that they fill, and one of them completes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from . import folders
from .shards import Report, ShardWriter, collect, report_failure, report_in

Complete = Callable[[Path, Mapping[int, Report]], str]
"""Makes a checkpoint of a folder that holds the files of all reports; what to say about it."""

POLL_SECONDS = 0.02
COPY_BYTES = 16 << 20


class SaveError(RuntimeError):
    """The state of a run's last step, or of the one at which it was stopped, could not be saved."""


class Save(threading.Thread):
    """Writes this rank's part and, on one rank, completes the folder."""

    def __init__(
        self,
        writer: ShardWriter,
        ranks: Sequence[int],
        complete: Complete | None,
        upload: Upload | None,
    ) -> None:
        """
        Args:
            ranks: that write into the same folder.
            complete: on the rank that completes it; None on others.
            upload: begins once this rank's part is written.
        """
        super().__init__(name=writer.folder.name, daemon=True)
        self.written = threading.Event()
        self.published = complete is None
        """Whether the folder has been completed; true where another rank does."""
        self.outcome = ""
        self._writer, self._ranks, self._complete, self._upload = writer, ranks, complete, upload

    def run(self) -> None:
        report = None
        # Whoever completes the folder finds the reason of a failure in it.
        with contextlib.suppress(Exception):
            report = self._writer.write()
        self.written.set()
        if self._upload is not None:
            self._upload.begin(report, self._writer.opened)
        if self._complete is None:
            return
        try:
            while (reports := collect(self._writer.folder, self._ranks)) is None:
                time.sleep(POLL_SECONDS)
            self.outcome = self._complete(self._writer.folder, reports)
            self.published = True
        except Exception as error:
            discard(self._writer.folder)
            self.outcome = failure(self._writer.folder, error)


class Upload(threading.Thread):
    """Copies this rank's file into the run's folder; rank 0 makes that folder and completes it."""

    def __init__(self, folder: Path, rank: int, ranks: int, complete: Complete | None) -> None:
        super().__init__(name=f"upload-{folder.name}", daemon=True)
        self.folder = folder
        self.rank, self.ranks = rank, range(ranks)
        self.abandon = threading.Event()
        self.state = "running"
        """running, done or failed."""
        self.outcome = ""
        self._complete = complete
        self._report: Report | None = None
        self._source: BinaryIO | None = None

    def begin(self, report: Report | None, source: BinaryIO | None) -> None:
        """Start; without a report, as the file could not be written, fail at once."""
        self._report, self._source = report, source
        self.start()

    def run(self) -> None:
        try:
            self._carry()
            self.state = "done"
        except Exception as error:
            report_failure(self.folder, self.rank, error)
            if self._complete is not None:
                discard(self.folder)
                name = self.folder.name.removesuffix(folders.PARTIAL)
                self.outcome = f"could not upload {name}: {error}; it stays on the local disks"
            self.state = "failed"
        finally:
            if self._source is not None:
                self._source.close()

    def _carry(self) -> None:
        if self._complete is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        while not self.folder.is_dir():
            self._pause()
        if self._report is None:
            raise OSError("its file was not written")
        for name, checksum in self._report.files.items():
            assert self._source is not None
            self._copy(self._source, self.folder / name, checksum[1])
        report_in(self.folder, self.rank, self._report)
        if self._complete is None:
            return
        while (reports := collect(self.folder, self.ranks, begun=False)) is None:
            self._pause()
        self.outcome = self._complete(self.folder, reports)

    def _copy(self, source: BinaryIO, target: Path, expected: str) -> None:
        digest = hashlib.sha256()
        with target.open("wb") as file:
            while chunk := source.read(COPY_BYTES):
                digest.update(chunk)
                file.write(chunk)
                if self.abandon.is_set():
                    break
            file.flush()
            os.fsync(file.fileno())
        if self.abandon.is_set():
            raise OSError("another rank could not")
        if digest.hexdigest() != expected:
            raise OSError(f"{target.name} has changed on the local disk since it was written")

    def _pause(self) -> None:
        if self.abandon.wait(POLL_SECONDS):
            raise OSError("another rank could not")


def failure(folder: Path, problem: object) -> str:
    """What to say of a save that did not work."""
    return f"could not save {folder.name.removesuffix(folders.PARTIAL)}: {problem}"


def discard(folder: Path) -> None:
    """Remove an unfinished checkpoint."""
    # What resists is removed at the next start.
    with contextlib.suppress(OSError):
        folders.remove(folder)

"""Documents of a folder: an index of JSON lines beside the images that it names."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .documents import Document, parse_record
from .images import Blob
from .skips import ImageError

INDEX_NAME = "index.jsonl"


class ImageFolder:
    """A line of the index is a document; see `documents.py` for its form. Blank lines are none.

    Files are named relative to the folder of the index and lie inside it.

    Raises:
        UserError: there is no index, or it is empty.
    """

    def __init__(self, path: Path) -> None:
        self.index = path / INDEX_NAME if path.is_dir() else path
        self.folder = self.index.parent
        self.name = str(path)
        try:
            status = self.index.stat()
            self._lines = _lines(self.index)  # [documents, 2]
        except OSError as error:
            raise UserError(f"{self.index} cannot be read ({error.strerror}); expected JSON lines") from error
        if not len(self._lines):
            raise UserError(f"{self.index} has no lines; expected one document in each")
        identity = f"{self.index.resolve()} {status.st_size} {status.st_mtime_ns}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> Document:
        """Document `index`. Raises UserError where its line is no record."""
        start, number = self._lines[index].tolist()
        name = f"{self.index} line {number}"
        try:
            with self.index.open("rb") as stream:
                stream.seek(start)
                line = stream.readline()
        except OSError as error:
            raise ImageError("unreadable") from error
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} is not valid JSON: {error}") from error
        return parse_record(record, name, self._resolve)

    def _resolve(self, name: str) -> Blob:
        relative = os.path.normpath(name)
        if os.path.isabs(relative) or relative.split(os.sep)[0] == os.pardir:
            return ImageError("outside the folder")
        return self.folder / relative


def _lines(path: Path) -> npt.NDArray[np.int64]:
    """Byte offset and number, from 1, of each line that is not blank."""
    found = array("q")
    start = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                found.extend((start, number))
            start += len(line)
    return np.frombuffer(found, np.int64).reshape(-1, 2)

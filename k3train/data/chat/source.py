"""Chats of .jsonl files by number, split into training and validation by what a line holds."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ..cache import cache_folder
from ..skips import ImageError
from ..sources import COMPRESSIONS, file_kind, find_inputs
from . import exercises
from .messages import Chat, load_chat

ALL, TRAIN, VALID = "all", "train", "valid"


class ChatFiles:
    """The lines of some files, blank ones aside. A split depends on the text of lines, not on their place.

    Raises:
        UserError: a file cannot be read, is of another kind, or the split is empty.
    """

    def __init__(self, paths: Sequence[Path], split: str = ALL, held_out: float = 0.0) -> None:
        """`split` is ALL, TRAIN (without the share `held_out`) or VALID (that share, at least one chat)."""
        self.paths = list(paths)
        self.name = ", ".join(map(str, self.paths))
        found, identity = [], [split, held_out]
        for number, path in enumerate(self.paths):
            found.append(_lines(path, number))
            status = path.stat()
            identity += [str(path.resolve()), status.st_size, status.st_mtime_ns]
        places, shares = (np.concatenate(each) for each in zip(*found, strict=True))
        self._places = places if split == ALL else places[_held_out(shares, held_out) == (split == VALID)]
        if not len(self._places):
            raise UserError(f"{self.name} holds no chat" + _empty_split(split, held_out))
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._places)

    def where(self, index: int) -> str:
        """File and line of a chat, for errors."""
        file, _, line = self._places[index].tolist()
        return f"{self.paths[file]}, line {line}"

    def folder(self, index: int) -> Path:
        """What the images of a chat are relative to."""
        return self.paths[self._places[index, 0]].parent

    def read(self, index: int) -> Chat:
        """Chat `index`. Raises UserError where its line is none, ImageError where the file cannot be read."""
        file, start, _ = self._places[index].tolist()
        try:
            with self.paths[file].open("rb") as stream:
                stream.seek(start)
                line = stream.readline()
        except OSError as error:
            raise ImageError("unreadable") from error
        return load_chat(line, self.where(index))


def find_chats(inputs: Sequence[str], key: str, cache_dir: str | None) -> list[Path]:
    """The files that `inputs` name: files, folders, globs, or `exercises`, the bundled ones.

    Raises:
        UserError: see `named_files`; the cache folder cannot be written.
    """
    paths = named_files(inputs, key)
    if exercises.NAME in inputs:
        paths.append(exercises.bundled(cache_folder(cache_dir)))
    return paths


def named_files(inputs: Sequence[str], key: str) -> list[Path]:
    """The files of `find_chats` but for the bundled one, which this does not make.

    Raises:
        UserError: there are none, or one is no plain .jsonl.
    """
    if not inputs:
        raise UserError(f"{key} is empty; name .jsonl files of chats, or {exercises.NAME}")
    named = [name for name in inputs if name != exercises.NAME]
    paths = find_inputs(named) if named else []
    for path in paths:
        if file_kind(path) != "jsonl" or path.suffix in COMPRESSIONS:
            raise UserError(f"{key}: {path}: chats are read from plain .jsonl files, one chat a line")
    return paths


def _lines(path: Path, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(number, offset, line from 1) of each line, [chats, 3], and their shares, [chats]."""
    found, shares = array("q"), array("d")
    start = 0
    try:
        with path.open("rb") as stream:
            for line_number, line in enumerate(stream, start=1):
                if line.strip():
                    found.extend((number, start, line_number))
                    shares.append(_share(line))
                start += len(line)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return np.frombuffer(found, np.int64).reshape(-1, 3), np.frombuffer(shares, np.float64)


def _held_out(shares: npt.NDArray[np.float64], held_out: float) -> npt.NDArray[np.bool_]:
    """Which lines are held out, [chats]: where that would be none, the first by share and its copies."""
    bound = max(held_out, np.nextafter(shares.min(initial=1.0), 2.0)) if held_out else 0.0
    return shares < bound


def _share(line: bytes) -> float:
    """A number in [0, 1) that the text of a line decides."""
    return int.from_bytes(hashlib.blake2b(line.strip(), digest_size=8).digest(), "big") / 2**64


def _empty_split(split: str, held_out: float) -> str:
    if split == ALL:
        return ""
    what = "to learn from" if split == TRAIN else "to validate on"
    return f" {what} with data.held_out={held_out:g}; set another share, or name data.valid_path"

"""Tensors out of a folder of safetensors files, one at a time, with every fault of the folder named.

A safetensors file is a little-endian length of eight bytes, that many bytes of JSON (dtype, shape and place
of each tensor) and the tensors. It is read here without mapping it into memory, so that a process holds one
tensor and no more.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UserError
from .config import Description, read, read_json
from .keys import ITEM_BYTES, Piece, Stored, pieces
from .packing import TORCH_DTYPES, from_stored

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
HEADER_LIMIT = 1 << 28
CHECKED_AT_ONCE = 1 << 20


class Place(NamedTuple):
    """Where a tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""


def read_header(path: Path) -> dict[str, Place]:
    """Every tensor of one file by its key.

    Raises:
        UserError: the file is missing, torn, truncated or too long.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise UserError(f"{path}: {size} bytes, and no header of a safetensors file in them")
            tree: dict[str, Any] = json.loads(file.read(length))
            tree.pop("__metadata__", None)
            places = {key: _place(path, entry, 8 + length) for key, entry in tree.items()}
            ends = [8 + length + entry["data_offsets"][1] for entry in tree.values()]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: its header is torn ({error})") from error
    if size != max(ends, default=8 + length):
        raise UserError(
            f"{path}: has {size} bytes and should have {max(ends, default=8 + length)}; copy it again"
        )
    return places


def _place(path: Path, entry: Mapping[str, Any], start: int) -> Place:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{end - begin} bytes for {dtype} {list(shape)}")
    return Place(path, dtype, shape, start + begin)


class SafetensorsFolder:
    """The tensors of all files of a folder.

    Raises:
        UserError: a file is missing, torn or truncated, or the index does not fit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files, self._index = _files(folder)
        self.places: dict[str, Place] = {}
        for path in self.files:
            for key, place in read_header(path).items():
                if key in self.places:
                    other = self.places[key].path.name
                    raise UserError(f"{path}: {key} is also in {other}; a tensor has one place")
                self.places[key] = place
        for key, name in self._index.items():
            if key not in self.places or self.places[key].path.name != name:
                raise UserError(f"{folder / name}: {key} is not in it, though {INDEX} says so")

    def fingerprint(self) -> list[list[Any]]:
        """What changes when a file does: names, sizes and times."""
        files = [*self.files, self.folder / "config.json"]
        return [[path.name, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in files]

    def check(self, expected: Iterable[Piece]) -> None:
        """Compare keys, shapes and dtypes with what a model has.

        Raises:
            UserError: the first problem, and how many there are.
        """
        problems, known = [], set()
        for piece in expected:
            for stored in piece.stored:
                known.add(stored.key)
                if problem := self._problem(piece, stored):
                    problems.append(problem)
        unknown = [(key, place) for key, place in self.places.items() if key not in known]
        problems += [f"{place.path}: {key} is unknown to the model in config.json" for key, place in unknown]
        if problems:
            more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
            raise UserError(problems[0] + more)

    def _problem(self, piece: Piece, stored: Stored) -> str | None:
        place = self.places.get(stored.key)
        if place is None:
            return f"{self.folder}: {stored.key} is missing"
        if place.dtype != stored.dtype:
            return f"{place.path}: {stored.key} is {place.dtype} and should be {stored.dtype}"
        longer = piece.form == "padded" and len(place.shape) == 1 and place.shape[0] >= piece.shape[0]
        if place.shape != stored.shape and not longer:
            shapes = f"{list(place.shape)} and should have {list(stored.shape)}"
            return f"{place.path}: {stored.key} has the shape {shapes}"
        return None

    def read_rows(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """See `read_rows`."""
        return read_rows(piece, [self.places[stored.key] for stored in piece.stored], dtype)


def read_tensor(key: str, place: Place) -> Tensor:
    """One tensor as it stands in its file; raises UserError when the file ends too early."""
    length = math.prod(place.shape) * ITEM_BYTES[place.dtype]
    buffer = bytearray(length)
    with place.path.open("rb", buffering=0) as file:
        file.seek(place.begin)
        view, filled = memoryview(buffer), 0
        while filled < length and (got := file.readinto(view[filled:])):
            filled += got
    if filled != length:
        raise UserError(f"ends inside {key}")
    dtype = TORCH_DTYPES[place.dtype]
    tensor = torch.frombuffer(buffer, dtype=dtype) if length else torch.empty(0, dtype=dtype)
    return tensor.view(place.shape)


def read_rows(piece: Piece, places: Sequence[Place], dtype: torch.dtype) -> Tensor:
    """The rows that a piece is, decoded; packed ones in `dtype`. `places`: of its tensors.

    Raises:
        UserError: they are not finite numbers, or their file is damaged.
    """
    try:
        tensors = [read_tensor(stored.key, place) for stored, place in zip(piece.stored, places, strict=True)]
        rows = from_stored(piece, tensors, dtype)
        check_finite(piece.stored[-1].key, rows)
    except UserError as error:
        raise UserError(f"{places[0].path}: {error}") from error
    return rows


def check_finite(name: str, values: Tensor) -> None:
    """Refuse NaN and infinity; raises UserError, which says how many there are and where the first one is."""
    if all(torch.isfinite(part).all() for part in values.reshape(-1).split(CHECKED_AT_ONCE)):
        return
    wrong = (~torch.isfinite(values)).nonzero()
    raise UserError(
        f"{name}: {len(wrong)} of {values.numel()} numbers are NaN or infinite, "
        f"the first at {wrong[0].tolist()}"
    )


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a folder, and key -> file name where an index says so."""
    index = folder / INDEX
    if not index.exists():
        single = sorted(folder.glob(f"*{SUFFIX}"))
        if len(single) != 1:
            raise UserError(
                f"{folder}: {len(single)} {SUFFIX} files and no {INDEX}; it needs one file or an index"
            )
        return single, {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index}: has no weight_map of keys to file names")
    for key, name in weight_map.items():
        if PurePosixPath(name).name != name:
            raise UserError(
                f"{index}: {name!r} leads out of the folder; a file of weights lies beside the index"
            )
        if not (folder / name).is_file():
            count = sum(other == name for other in weight_map.values())
            raise UserError(f"{folder / name}: is missing; {INDEX} has {count} tensors in it, one is {key}")
    return [folder / name for name in sorted(set(weight_map.values()))], weight_map


class HuggingFaceTensors:
    """The tensors of a Hugging Face folder by our names, with the methods of `CheckpointTensors`.

    Args:
        lenient: accept unknown keys in `config.json`.

    Raises:
        UserError: the folder is damaged, or is no model of ours.
    """

    def __init__(self, folder: Path, *, lenient: bool = False) -> None:
        self.folder = folder
        self.description: Description = read(folder, lenient=lenient)
        self.shards = SafetensorsFolder(folder)
        self.pieces = list(pieces(*self.description))
        self.shards.check(self.pieces)
        self.dtype = TORCH_DTYPES[self.description.layout.dtype]
        self._by_name: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            self._by_name[piece.name].append(piece)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of our tensors; raises UserError if the folder has none of the name."""
        found = self._pieces(name)
        return (sum(piece.shape[0] for piece in found), *found[0].shape[1:])

    def read(self, name: str) -> Tensor:
        """One of our tensors, in the folder's dtype or FP32.

        Raises:
            UserError: there is no such tensor, it holds NaN or infinity, or its file is damaged.
        """
        parts = [self.shards.read_rows(piece, self.dtype) for piece in self._pieces(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pieces(self, name: str) -> list[Piece]:
        if name not in self._by_name:
            raise UserError(f"{self.folder}: has no tensor for {name}")
        return self._by_name[name]

"""Single tensors out of, and into, a checkpoint's files by their global names, without building a model.

megatron-core writes torch's distributed format: files of tensors, each as `torch.save` puts it, and a pickled
table of which rectangle of which tensor lies where. Routed experts of a layer are one tensor whose first
dimension is the expert. Nothing here is a collective, and no process reads more than it asks for.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import UserError
from . import folders, manifest
from .unpickling import load_tensor, read_table, reason

TABLE = ".metadata"
PREFIX = "model."
_EXPERT = re.compile(r"^(?P<head>.*\.mlp\.experts\.)(?P<number>\d+)\.(?P<tail>.*)$")


def place(name: str) -> tuple[str, int | None]:
    """Key of a tensor in a checkpoint, and its first index there if it is one expert's of many."""
    if expert := _EXPERT.match(name):
        return f"{PREFIX}{expert['head']}experts.{expert['tail']}", int(expert["number"])
    return PREFIX + name, None


class CheckpointTensors:
    """The model's tensors in the folder of a complete checkpoint; safe to use from several processes.

    Raises:
        UserError: the table of its tensors is missing or torn, or would run code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / TABLE).open("rb") as file:
                self._metadata = read_table(file, folder / TABLE)
        except OSError as error:
            raise UserError(f"{folder / TABLE}: missing or torn ({error.strerror or error})") from error
        assert self._metadata.storage_data is not None

    def __contains__(self, name: str) -> bool:
        key, index = place(name)
        entry = self._metadata.state_dict_metadata.get(key)
        return isinstance(entry, TensorStorageMetadata) and (index is None or index < entry.size[0])

    def has_key(self, key: str) -> bool:
        """Whether anything of a checkpoint's own key is in it."""
        return key in self._metadata.state_dict_metadata

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; raises UserError if there is none of the name."""
        key, index = place(name)
        return tuple(self._entry(name, key).size[0 if index is None else 1 :])

    def read(self, name: str, first: int = 0, rows: int | None = None) -> Tensor:
        """Rows `first` to `first + rows` of a tensor, all of them when left out, in its own dtype.

        Raises:
            UserError: there is no such tensor, or its file is damaged.
        """
        key, index = place(name)
        entry = self._entry(name, key)
        size = list(entry.size)
        offset = [0] * len(size)
        axis = 0
        if index is not None:
            offset[0], size[0], axis = index, 1, 1
        offset[axis] = first
        size[axis] = size[axis] - first if rows is None else rows
        whole = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        if whole in entry.chunks:
            loaded = self._load(MetadataIndex(key, whole.offsets))
            return loaded if index is None else loaded[0]
        result = torch.empty(size, dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            if shared := overlap(offset, size, chunk):
                inside, outside = shared
                part = self._load(MetadataIndex(key, chunk.offsets))[inside]
                result[outside] = part
                filled += part.numel()
        if filled != result.numel():
            raise UserError(f"{self.folder}: {key} has {filled} of {result.numel()} numbers")
        return result if index is None else result[0]

    def _entry(self, name: str, key: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(f"{self.folder}: has no tensor {name}")
        return entry

    def _load(self, index: MetadataIndex) -> Tensor:
        info: _StorageInfo = self._metadata.storage_data[index]  # type: ignore[index]
        path = self.folder / info.relative_path
        try:
            with path.open("rb") as file:
                loaded: Tensor = load_tensor(slice_of(file, info.offset, info.length))
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise UserError(f"{path}: {index.fqn} cannot be read ({reason(error)})") from error
        if not isinstance(loaded, Tensor):
            raise UserError(f"{path}: {index.fqn} is no tensor but {type(loaded).__name__}")
        return loaded


class _Slice(io.RawIOBase):
    """A part of an open file as a file of its own: a tensor is read into its memory and nowhere else."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.place = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.length}[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.length - self.place)]
        self.file.seek(self.begin + self.place)
        got: int = self.file.readinto(view)  # type: ignore[attr-defined]
        self.place += got
        return got


def slice_of(file: BinaryIO, begin: int, length: int) -> io.BufferedReader:
    """`length` bytes of an open file from `begin` on, as a file."""
    return io.BufferedReader(_Slice(file, begin, length))


def overlap(
    offset: Sequence[int], size: Sequence[int], chunk: ChunkStorageMetadata
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a chunk and a wanted rectangle meet: slices of the chunk, and of the rectangle."""
    inside, outside = [], []
    for start, length, low, extent in zip(offset, size, chunk.offsets, chunk.sizes, strict=True):
        begin, end = max(start, low), min(start + length, low + extent)
        if begin >= end:
            return None
        inside.append(slice(begin - low, end - low))
        outside.append(slice(begin - start, end - start))
    return tuple(inside), tuple(outside)


class Written(NamedTuple):
    """One tensor's rows in a file, as `finish` needs to know it."""

    name: str
    first: int
    shape: Sequence[int]
    dtype: str
    offset: int
    length: int


class _Hashing:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(memoryview(data).cast("B"))
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_file(path: Path, parts: Iterable[tuple[str, int, Tensor]]) -> tuple[list[Written], list[Any]]:
    """Write one file of (name, first row, rows); what it holds, and its size and SHA-256."""
    written = []
    with path.open("wb") as file:
        hashing = _Hashing(file)
        for name, first, tensor in parts:
            offset = hashing.size
            _, index = place(name)
            torch.save(tensor if index is None else tensor[None], hashing)  # type: ignore[arg-type]
            kind = str(tensor.dtype).removeprefix("torch.")
            written.append(Written(name, first, tuple(tensor.shape), kind, offset, hashing.size - offset))
        file.flush()
        os.fsync(file.fileno())
    return written, [hashing.size, hashing.digest.hexdigest()]


def finish(
    folder: Path, files: dict[str, list[Written]], checksums: dict[str, list[Any]], content: dict[str, Any]
) -> None:
    """Make `files`, which `write_file` has left in a folder, a complete checkpoint of weights alone."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for relative_path, parts in files.items():
        for part in parts:
            key, chunk = _chunk(part)
            entry = tensors.setdefault(key, _empty_entry(part))
            entry.chunks.append(chunk)
            info = _StorageInfo(relative_path, part.offset, part.length)
            storage[MetadataIndex(key, chunk.offsets)] = info
    for entry in tensors.values():
        ends = (map(sum, zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in entry.chunks)
        entry.size = torch.Size(max(axis) for axis in zip(*ends, strict=True))
    with (folder / TABLE).open("wb") as file:
        pickle.dump(Metadata(dict(tensors), None, storage), file)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))
    folders.sync(folder / TABLE)
    manifest.write(folder, content, checksums)


def _chunk(part: Written) -> tuple[str, ChunkStorageMetadata]:
    key, index = place(part.name)
    offsets, sizes = [part.first, *[0] * (len(part.shape) - 1)], list(part.shape)
    if index is not None:
        offsets, sizes = [index, *offsets], [1, *sizes]
    return key, ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _empty_entry(part: Written) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=getattr(torch, part.dtype))
    return TensorStorageMetadata(properties, torch.Size(), [])

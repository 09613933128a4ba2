"""Safetensors files written tensor by tensor, their index, and checksums in the form of `sha256sum`."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, uint8

from ...errors import UserError
from .keys import Piece
from .packing import to_stored
from .reader import INDEX, SUFFIX, check_finite

CHECKSUMS = "SHA256SUMS"
NAME = "model-{0:05d}-of-{1:05d}" + SUFFIX


class Shard(NamedTuple):
    """One file of weights."""

    name: str
    pieces: tuple[Piece, ...]


def plan_shards(pieces: Iterable[Piece], limit: int, name: str = NAME) -> list[Shard]:
    """Cut pieces, in their order, into files of at most `limit` bytes; a larger piece has a file of its own.

    Args:
        name: of a file, from its number, counted from 1, and the number of files.
    """
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not groups or piece.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(piece)
        room -= piece.nbytes
    return [Shard(name.format(i, len(groups)), tuple(group)) for i, group in enumerate(groups, 1)]


def write_shard(path: Path, shard: Shard, read: Callable[[Piece], Tensor], rounding: str) -> list[Any]:
    """Write one file; its size and SHA-256. Holds the tensors of one piece at a time.

    Args:
        read: our rows of a piece.
        rounding: of the scales of MXFP4.

    Raises:
        UserError: a tensor holds NaN or infinity.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:

        def put(data: Any) -> None:
            nonlocal size
            digest.update(data)
            size += file.write(data)

        put(_header(shard.pieces))
        for piece in shard.pieces:
            rows = read(piece)
            check_finite(piece.name, rows)
            for stored, tensor in zip(piece.stored, to_stored(piece, rows, rounding), strict=True):
                assert tuple(tensor.shape) == stored.shape, (stored, tensor.shape)
                put(tensor.contiguous().view(-1).view(uint8).numpy())
        file.flush()
        os.fsync(file.fileno())
    return [size, digest.hexdigest()]


def _header(pieces: Sequence[Piece]) -> bytes:
    tree: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for piece in pieces:
        for stored in piece.stored:
            end = begin + stored.nbytes
            tree[stored.key] = {
                "dtype": stored.dtype,
                "shape": list(stored.shape),
                "data_offsets": [begin, end],
            }
            begin = end
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Which file each tensor is in."""
    weight_map = {
        stored.key: shard.name for shard in shards for piece in shard.pieces for stored in piece.stored
    }
    total = sum(piece.nbytes for shard in shards for piece in shard.pieces)
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(tree, indent=2) + "\n")


def write_checksums(folder: Path, known: Mapping[str, Sequence[Any]]) -> None:
    """List the SHA-256 of every file of a folder; `known` has [size, SHA-256] of some by their names."""
    lines = []
    for path in sorted(entry for entry in folder.iterdir() if entry.is_file()):
        if path.name in known:
            lines.append(f"{known[path.name][1]}  {path.name}\n")
        elif path.name != CHECKSUMS and not path.name.startswith("."):
            lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    (folder / CHECKSUMS).write_text("".join(lines))


def read_checksums(folder: Path) -> dict[str, str]:
    """File name -> SHA-256, empty where the folder has no list. Raises UserError when the list is torn."""
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise UserError(f"{path}: line {number} is no checksum and name")
        found[name] = digest
    return found

"""Megatron's `.bin`/`.idx` pair: the tokens of all sequences back to back, and where each one lies.

The same layout as `megatron.core.datasets.indexed_dataset`, read and written here without torch, so that
preparing a corpus starts at once, and with every length checked, so that a torn pair is refused by name.
Letters: n sequences, d documents.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, n, d + 1
DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
# Megatron leaves the top of the 16-bit range free.
UINT16_LIMIT = 65500


@dataclass(frozen=True, eq=False)
class IndexedCorpus:
    """A memory-mapped corpus."""

    prefix: str
    tokens: npt.NDArray[Any]  # [total]
    lengths: npt.NDArray[np.int32]  # [n]
    pointers: npt.NDArray[np.int64]  # [n], in bytes

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.size)

    def __len__(self) -> int:
        return int(self.lengths.size)

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Tokens [start, stop) of one sequence, as a view of the file."""
        first = int(self.pointers[sequence]) // self.tokens.itemsize
        stop = int(self.lengths[sequence]) if stop is None else stop
        return self.tokens[first + start : first + stop]


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The narrowest type that Megatron's tools give a vocabulary of this size."""
    return np.uint16 if vocab_size < UINT16_LIMIT else np.int32


def write_index(path: Path, lengths: npt.NDArray[np.int32], dtype: npt.DTypeLike) -> None:
    """Write the `.idx` of `lengths` [n], one sequence a document, and force it to disk."""
    code = next(code for code, known in DTYPES.items() if known == np.dtype(dtype))
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = (ends - lengths) * np.dtype(dtype).itemsize
    with path.open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, code, lengths.size, lengths.size + 1))
        stream.write(lengths.astype(np.int32).tobytes())
        stream.write(starts.tobytes())
        stream.write(np.arange(lengths.size + 1, dtype=np.int64).tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def open_corpus(prefix: str) -> IndexedCorpus:
    """Map `<prefix>.bin` and `<prefix>.idx`.

    Raises:
        UserError: a file is missing, is of another kind, or the two do not belong together.
    """
    bin_path, idx_path = Path(f"{prefix}.bin").expanduser(), Path(f"{prefix}.idx").expanduser()
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise UserError(f"{path} does not exist; `k3train data prepare` makes the .bin/.idx pair")
    try:
        return _map_pair(prefix, bin_path, idx_path)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _map_pair(prefix: str, bin_path: Path, idx_path: Path) -> IndexedCorpus:
    dtype, num_sequences, num_borders = _read_header(idx_path)
    body = HEADER.size + 12 * num_sequences + 8 * num_borders
    size = idx_path.stat().st_size
    # Multimodal indices end with one more byte for each sequence.
    if size not in (body, body + num_sequences):
        raise UserError(f"{idx_path} holds {size} bytes where its header says {body}: torn, prepare it again")
    index = np.memmap(idx_path, mode="r")
    lengths = np.frombuffer(index, np.int32, num_sequences, HEADER.size)
    pointers = np.frombuffer(index, np.int64, num_sequences, HEADER.size + 4 * num_sequences)
    itemsize = np.dtype(dtype).itemsize
    expected = int(pointers[-1]) + int(lengths[-1]) * itemsize if num_sequences else 0
    actual = bin_path.stat().st_size
    if expected != actual:
        raise UserError(
            f"{bin_path} holds {actual} bytes where {idx_path.name} says {expected}: torn, prepare it again"
        )
    tokens = np.memmap(bin_path, dtype, mode="r") if actual else np.empty(0, dtype)
    return IndexedCorpus(prefix, tokens, lengths, pointers)


def _read_header(path: Path) -> tuple[type[np.integer[Any]], int, int]:
    with path.open("rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"{path} is not a Megatron index, or is cut off in its header")
    _, version, code, num_sequences, num_borders = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise UserError(f"{path} has version {version} and token type {code}; known: 1 and {sorted(DTYPES)}")
    return DTYPES[code], num_sequences, num_borders

"""Blocks that know what they hold: one aligned block of header, then the payload.

The header carries the file's random token, the block's place, a generation and a checksum, which must be
those of the last write: old, foreign, swapped, torn and damaged blocks are all found when one is read back.
"""

from __future__ import annotations

import struct

import numpy as np
from torch import Tensor

from .alignment import ALIGNMENT

HEADER = struct.Struct("<8s16sQQQQ")
"""Magic, token of the file, offset, generation, count, checksum."""
MAGIC = b"k3offl01"


def seal(memory: Tensor, token: bytes, offset: int, generation: int, count: int) -> int:
    """Fill in the header of a block, uint8 [ALIGNMENT + n * ALIGNMENT] on the host; return the checksum.

    `count` says how much of the payload counts, in the caller's unit.
    """
    found = checksum(memory[ALIGNMENT:])
    header = HEADER.pack(MAGIC, token, offset, generation, count, found)
    memory[: len(header)].numpy()[:] = np.frombuffer(header, dtype=np.uint8)
    return found


def verify(
    memory: Tensor, token: bytes, offset: int, generation: int, count: int, checked: int, name: str
) -> None:
    """Raise OSError unless a block is the one that `seal` made of the same, whose checksum was `checked`."""
    header = memory[: HEADER.size].numpy().tobytes()
    if header != HEADER.pack(MAGIC, token, offset, generation, count, checked):
        raise OSError(f"the file holds something else than generation {generation} of {name}")
    if checksum(memory[ALIGNMENT:]) != checked:
        raise OSError(f"the checksum of {name} does not match")


def checksum(payload: Tensor) -> int:
    """Of uint8 [n * ALIGNMENT]: sums of 64-bit words by block, each weighted by an odd number of its place.

    At the speed of memory, where a CRC would be slower than the disk; it sees old, swapped and torn blocks.
    """
    words = payload.numpy().view(np.uint64).reshape(-1, ALIGNMENT // 8)
    sums = words.sum(axis=1, dtype=np.uint64)
    weights = np.arange(len(sums), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return int((sums * weights).sum(dtype=np.uint64))

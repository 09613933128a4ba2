"""Where codes and scales lie in a stored vector; see the package."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Elements that share a scale."""
SCALE_BYTES = 4
ALIGNMENT = 256
"""Of both parts, bytes."""
GROUP = BLOCK * ALIGNMENT // SCALE_BYTES
"""Elements whose scales fill one aligned piece."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

LARGEST = 448.0
"""Of E4M3."""
SMALLEST_SCALE = 2.0**-116
"""With it the smallest code is 2^-125: no product of the codec is a denormal number."""
SCALE_MASK = ~0xF
"""Leaves 20 of FP32's 24 significant bits; an E4M3 number has 4."""
INFINITY_BITS = 0x7F800000
"""Of FP32; the bits of a NaN's magnitude are a larger integer, those of a finite number a smaller one."""


def code_bytes(numel: int) -> int:
    """Length of the first part: a code for each element, rounded up."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def scale_bytes(numel: int) -> int:
    """Length of the second part: a scale for each block, rounded up."""
    return -(-numel // GROUP) * ALIGNMENT


def encoded_nbytes(numel: int) -> int:
    """Bytes that `numel` elements take when stored."""
    return code_bytes(numel) + scale_bytes(numel)


def check_source(source: Tensor) -> None:
    """What `encode` demands of its caller."""
    assert source.dim() == 1 and source.is_contiguous(), "a vector in memory order"
    assert source.dtype in DTYPES, f"FP8 stores {DTYPES}, not {source.dtype}"


def check_buffer(buffer: Tensor, numel: int, dtype: torch.dtype) -> None:
    """What `decode` demands of its caller; more bytes than needed are allowed behind the end."""
    assert buffer.storage_offset() % SCALE_BYTES == 0, "scales are read where they lie"
    assert buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous(), "stored bytes"
    assert buffer.numel() >= encoded_nbytes(numel), f"{numel} elements take more than {buffer.numel()} bytes"
    assert dtype in DTYPES, f"FP8 stores {DTYPES}, not {dtype}"

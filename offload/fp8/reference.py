"""Block FP8 in plain PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import (
    BLOCK,
    GROUP,
    INFINITY_BITS,
    LARGEST,
    SCALE_MASK,
    SMALLEST_SCALE,
    check_buffer,
    check_source,
    code_bytes,
    encoded_nbytes,
)


def encode(source: Tensor) -> Tensor:
    """See `offload.fp8.encode`."""
    check_source(source)
    numel = source.numel()
    padded = source.new_zeros(-(-numel // GROUP) * GROUP, dtype=torch.float32)
    padded[:numel] = source
    blocks = padded.view(-1, BLOCK)
    scales, finite = _scales(blocks)
    codes = (blocks * (1 / scales)[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(finite[:, None], codes, 0)
    scales = torch.where(finite, scales, torch.nan)
    buffer = torch.empty(encoded_nbytes(numel), dtype=torch.uint8, device=source.device)
    split = code_bytes(numel)
    buffer[:split] = codes.flatten()[:split]
    buffer[split:] = scales.view(torch.uint8)
    return buffer


def decode(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """See `offload.fp8.decode`."""
    check_buffer(buffer, numel, dtype)
    codes = buffer[:numel].view(torch.float8_e4m3fn).float()
    split = code_bytes(numel)
    scales = buffer[split : encoded_nbytes(numel)].view(torch.float32)
    return (codes * scales.repeat_interleave(BLOCK)[:numel]).to(dtype)


def _scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks FP32 [n, BLOCK] -> scales FP32 [n], 1 where a block is not finite, and which are finite [n]."""
    # Magnitudes compare like the integers of their bits, and a NaN is the largest.
    largest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(dim=1)
    finite = largest < INFINITY_BITS
    # By a tensor: on a GPU a division by a number is a product with its rounded inverse.
    scales = largest.view(torch.float32) / torch.full_like(largest, LARGEST, dtype=torch.float32)
    scales = (scales.view(torch.int32) & SCALE_MASK).view(torch.float32).clamp(min=SMALLEST_SCALE)
    return torch.where(finite, scales, 1.0), finite

"""Block FP8 in one Triton kernel each way: one read of the source and one write of the result.

A program takes ROWS blocks, whose scales fill exactly one aligned piece of the stored vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .layout import (
    ALIGNMENT,
    BLOCK,
    GROUP,
    INFINITY_BITS,
    LARGEST,
    SCALE_BYTES,
    SCALE_MASK,
    SMALLEST_SCALE,
    check_buffer,
    check_source,
    code_bytes,
    encoded_nbytes,
)

ROWS = ALIGNMENT // SCALE_BYTES
WARPS = 8


def encode(source: Tensor) -> Tensor:
    """See `offload.fp8.encode`."""
    check_source(source)
    numel = source.numel()
    if numel == 1:
        # Triton 3.6 makes a constant of an argument that is 1, and then leaves codes unwritten.
        return reference.encode(source)
    buffer = torch.empty(encoded_nbytes(numel), dtype=torch.uint8, device=source.device)
    if numel:
        split = code_bytes(numel)
        scales = buffer[split:].view(torch.float32)
        with torch.cuda.device(source.device):
            _encode_kernel[(triton.cdiv(numel, GROUP),)](
                source,
                buffer,
                scales,
                numel,
                split,
                ROWS=ROWS,
                BLOCK=BLOCK,
                LARGEST=LARGEST,
                SMALLEST_SCALE=SMALLEST_SCALE,
                SCALE_MASK=SCALE_MASK,
                INFINITY_BITS=INFINITY_BITS,
                num_warps=WARPS,
            )
    return buffer


def decode(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """See `offload.fp8.decode`."""
    check_buffer(buffer, numel, dtype)
    if numel == 1:
        return reference.decode(buffer, numel, dtype)
    decoded = torch.empty(numel, dtype=dtype, device=buffer.device)
    if numel:
        scales = buffer[code_bytes(numel) : encoded_nbytes(numel)].view(torch.float32)
        with torch.cuda.device(buffer.device):
            _decode_kernel[(triton.cdiv(numel, GROUP),)](
                buffer, scales, decoded, numel, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS
            )
    return decoded


@triton.jit
def _encode_kernel(  # type: ignore[no-untyped-def]
    source,
    codes,
    scales,
    numel,
    code_end,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    SCALE_MASK: tl.constexpr,
    INFINITY_BITS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(source + places, mask=places < numel, other=0.0).to(tl.float32)
    # Magnitudes compare like the integers of their bits, and a NaN is the largest.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < INFINITY_BITS
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full([ROWS], LARGEST, tl.float32))
    scale = (scale.to(tl.int32, bitcast=True) & SCALE_MASK).to(tl.float32, bitcast=True)
    scale = tl.where(finite, tl.maximum(scale, SMALLEST_SCALE), 1.0)
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
    x = tl.where(finite[:, None], x, 0.0)
    code = (x * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes + places, code, mask=places < code_end)
    tl.store(scales + rows, tl.where(finite, scale, float("nan")))


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    codes, scales, decoded, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    code = tl.load(codes + places, mask=places < numel, other=0).to(tl.float8e4nv, bitcast=True)
    scale = tl.load(scales + rows)
    x = code.to(tl.float32) * scale[:, None]
    tl.store(decoded + places, x.to(decoded.dtype.element_ty), mask=places < numel)

"""The MX codec as Triton kernels that read and write everything once; bit for bit the reference.

Numbers are rounded by adding and taking off a power of two, in FP32: that leaves a multiple of the distance
between elements, ties to even. Letters: B blocks of 32 values, T blocks of one program.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK, MXFP4, ROUNDINGS, Format
from . import reference
from .reference import Codec

TILE = 64
"""Blocks of one program."""

_MANTISSA = tl.constexpr(23)
_BIAS = tl.constexpr(127)
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SUBNORMAL_SCALE = tl.constexpr(0x00400000)


def codec() -> Codec:
    """See `Codec`."""
    return Codec(fake_quantise, to_bytes, from_bytes)


def fake_quantise(x: Tensor, fmt: Format, rounding: str) -> Tensor:
    """See `mx.fake_quantise`."""
    if x.shape[-1] % BLOCK:
        return reference.fake_quantise(x, fmt, rounding)
    x = x.contiguous()
    y = torch.empty_like(x)
    if blocks := x.numel() // BLOCK:
        _fake_quantise_kernel[(triton.cdiv(blocks, TILE),)](
            x, y, blocks, _added(fmt, rounding), fmt.most, fmt.least, fmt.mantissa, fmt.largest, TILE
        )
    return y


def to_bytes(x: Tensor, fmt: Format, rounding: str) -> Tensor:
    """See `mx.to_bytes`."""
    if x.shape[-1] % BLOCK or fmt != MXFP4:
        return reference.to_bytes(x, fmt, rounding)
    x = x.contiguous()
    blocks = prod(x.shape[1:]) // BLOCK
    packed = torch.empty(x.shape[0], blocks * (BLOCK // 2 + 1), dtype=torch.uint8, device=x.device)
    if packed.numel():
        _pack_kernel[(triton.cdiv(blocks, TILE), x.shape[0])](x, packed, blocks, _added(fmt, rounding), TILE)
    return packed


def from_bytes(packed: Tensor, shape: torch.Size, fmt: Format, dtype: torch.dtype) -> Tensor:
    """See `mx.from_bytes`."""
    if shape[-1] % BLOCK or fmt != MXFP4:
        return reference.from_bytes(packed, shape, fmt, dtype)
    packed = packed.contiguous()
    x = torch.empty(len(packed), *shape, dtype=dtype, device=packed.device)
    if x.numel():
        blocks = prod(shape) // BLOCK
        _unpack_kernel[(triton.cdiv(blocks, TILE), len(packed))](packed, x, blocks, TILE)
    return x


def _added(fmt: Format, rounding: str) -> int:
    """What is added to the bits of a block's largest magnitude before its exponent is read off."""
    assert rounding in ROUNDINGS, rounding
    return {"floor": 0, "ceil": (1 << 23) - 1, "even": 1 << 23 - fmt.mantissa - 1}[rounding]


@triton.jit
def _scale_codes(largest, added, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of magnitudes to E8M0 codes; for a NaN, 255."""
    codes = tl.maximum(((largest + added) >> _MANTISSA) - MOST, 0)
    return tl.where(largest > _INFINITY, 255, codes)


@triton.jit
def _scales(codes):  # type: ignore[no-untyped-def]
    """E8M0 codes to FP32; infinity for 255."""
    bits = tl.where(codes == 0, _SUBNORMAL_SCALE, codes << _MANTISSA)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rounded(  # type: ignore[no-untyped-def]
    sizes, codes, LEAST: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr
):
    """Magnitudes FP32 under scales of these codes to the elements next to them; undefined for 255."""
    reciprocals = (tl.maximum(254 - codes, 0) << _MANTISSA).to(tl.float32, bitcast=True)
    sizes = tl.minimum(sizes * reciprocals, LARGEST)
    exponents = sizes.to(tl.int32, bitcast=True) >> _MANTISSA
    # 2^23 times the distance of elements at this size.
    shift = tl.maximum(exponents, LEAST + _BIAS) - MANTISSA + _MANTISSA
    adder = (shift << _MANTISSA).to(tl.float32, bitcast=True)
    return (sizes + adder) - adder


@triton.jit
def _fake_quantise_kernel(  # type: ignore[no-untyped-def]
    x, y, blocks, added,
    MOST: tl.constexpr, LEAST: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    places = block[:, None] * 32 + tl.arange(0, 32)[None, :]  # [T, 32]
    inside = (block < blocks)[:, None]
    bits = tl.load(x + places, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    magnitudes = bits & _MAGNITUDE
    largest = tl.max(magnitudes, axis=1)
    codes = _scale_codes(largest, added, MOST)[:, None]
    elements = _rounded(magnitudes.to(tl.float32, bitcast=True), codes, LEAST, MANTISSA, LARGEST)
    values = elements * _scales(codes)
    signed = (values.to(tl.int32, bitcast=True) | (bits ^ magnitudes)).to(tl.float32, bitcast=True)
    signed = tl.where(codes == 255, float("nan"), signed)
    tl.store(y + places, signed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _nibbles(bits, codes):  # type: ignore[no-untyped-def]
    """FP32 bits under scales of these codes to E2M1 codes."""
    elements = _rounded((bits & _MAGNITUDE).to(tl.float32, bitcast=True), codes, 0, 1, 6.0)
    above = (elements.to(tl.int32, bitcast=True) >> 22) - 2 * 126  # exponent and mantissa, from 1.0 on
    nibbles = tl.where(elements >= 1, above, (elements * 2).to(tl.int32))
    return nibbles | ((bits >> 28) & 8)


@triton.jit
def _pack_kernel(x, packed, blocks, added, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Item by item: the codes of all blocks, 16 bytes each, then their scales."""
    item = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = (block < blocks)[:, None]
    places = (item * blocks + block)[:, None] * 32 + tl.arange(0, 32)[None, :]  # [T, 32]
    bits = tl.load(x + places, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    codes = _scale_codes(tl.max(bits & _MAGNITUDE, axis=1), added, 2)
    # A block that is NaN has no meaningful codes; zero is what the reference gives.
    nibbles = tl.where((codes < 255)[:, None], _nibbles(bits, codes[:, None]), (bits >> 28) & 8)
    even, odd = tl.split(tl.reshape(nibbles, (T, 16, 2)))  # [T, 16] each
    target = packed + item * blocks * 17
    bytes_of = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(target + bytes_of, (even | (odd << 4)).to(tl.uint8), mask=inside)
    tl.store(target + blocks * 16 + block, codes.to(tl.uint8), mask=block < blocks)


@triton.jit
def _values(nibbles, scales):  # type: ignore[no-untyped-def]
    """E2M1 codes under scales to FP32."""
    size = nibbles & 7
    above = ((size + 2 * 126) << 22).to(tl.float32, bitcast=True)
    values = tl.where(size >= 2, above, size.to(tl.float32) * 0.5) * scales
    bits = values.to(tl.int32, bitcast=True) | ((nibbles & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _unpack_kernel(packed, x, blocks, T: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = (block < blocks)[:, None]
    source = packed + item * blocks * 17
    bytes_of = block[:, None] * 16 + tl.arange(0, 16)[None, :]  # [T, 16]
    both = tl.load(source + bytes_of, mask=inside, other=0).to(tl.int32)
    codes = tl.load(source + blocks * 16 + block, mask=block < blocks, other=0).to(tl.int32)[:, None]
    scales = tl.where(codes == 255, float("nan"), _scales(codes))
    element = x.dtype.element_ty
    # Stores of neighbours: two of every other one take several times as long.
    values = tl.interleave(
        _values(both & 15, scales).to(element), _values(both >> 4, scales).to(element)
    )  # [T, 32]
    places = (item * blocks + block)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(x + places, values, mask=inside)

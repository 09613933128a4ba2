"""MX encoding and decoding in plain PyTorch: the reference, on any device.

What the OCP text leaves open, or others do otherwise:

- FP32 inside; FP64 input is rounded to FP32 first.
- A block with a NaN becomes NaN as a whole. Its E2M1 codes mean nothing, as E2M1 has no NaN; FP8 codes are
  NaN for NaN and infinity, else zero.
- An infinity counts as 2^128 for the scale, and is clipped like any number too large.
- A block of zeros, and one smaller than scales reach, has code 0: 2^-127. Zeros keep their signs.
- A tail shorter than a block is a block of its own.
- `ceil` and `even` may round a number from 1.75 * 2^127 on to 2^128, which FP32 does not have.

Source: OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3. Letters: n values along the last dimension,
b = n / 32 blocks of them, rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import BLOCK, MXFP4, ROUNDINGS, SCALE_NAN, Format

FP32_MANTISSA = 23
FP32_INFINITY = 0x7F800000
SUBNORMAL_SCALE = 0x00400000
"""Bits of 2^-127 in FP32: the one scale that is not a normal number."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between neighbours; at a tie the even code wins, which is the upper one in every other place.
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FP8 = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}


class Codec(NamedTuple):
    """What a backend offers; see the functions of the same names in `k3train.quant.mx`."""

    fake_quantise: Callable[[Tensor, Format, str], Tensor]
    to_bytes: Callable[[Tensor, Format, str], Tensor]
    from_bytes: Callable[[Tensor, torch.Size, Format, torch.dtype], Tensor]


def codec() -> Codec:
    """The reference as a backend; any dtype, any device."""
    return Codec(fake_quantise, to_bytes, from_bytes)


def encode(x: Tensor, fmt: Format, rounding: str = "floor") -> tuple[Tensor, Tensor]:
    """x [..., n] to its codes, uint8 [..., n], one to a byte, and its scales, uint8 [..., b].

    Elements are rounded to nearest, ties to even. `rounding` is one of ROUNDINGS, for the scale.
    """
    blocks = _blocks(x.to(torch.float32))  # [..., b, 32]
    scales = _scale_codes(blocks, fmt, rounding)
    elements = blocks * _reciprocals(scales)[..., None]
    codes = _e2m1_codes(elements) if fmt == MXFP4 else _fp8_codes(elements, fmt)
    return codes.flatten(-2)[..., : x.shape[-1]].contiguous(), scales


def decode(codes: Tensor, scales: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes uint8 [..., n], scales uint8 [..., b] to values [..., n], rounded once if `dtype` is too narrow.

    FP32 holds every value, but for products that fall below its normal numbers or reach 2^128; so does BF16.
    """
    values = _e2m1_values(codes) if fmt == MXFP4 else codes.view(_FP8[fmt.name]).to(torch.float32)
    blocks = _blocks(values) * scale_values(scales)[..., None]
    return blocks.flatten(-2)[..., : codes.shape[-1]].to(dtype)


def fake_quantise(x: Tensor, fmt: Format, rounding: str = "floor") -> Tensor:
    """The values [..., n] that `encode` keeps of x [..., n], in its dtype. Doing it twice changes nothing."""
    return decode(*encode(x, fmt, rounding), fmt, x.dtype)


def pack(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [..., n], n even, to bytes [..., n / 2]: even columns in the low half.

    The layout of `weight_packed` in released checkpoints.
    """
    assert codes.shape[-1] % 2 == 0, codes.shape
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The way back of `pack`: uint8 [..., n / 2] to [..., n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def to_bytes(x: Tensor, fmt: Format, rounding: str) -> Tensor:
    """See `mx.to_bytes`."""
    codes, scales = encode(x, fmt, rounding)
    return torch.cat([(pack(codes) if fmt.bits == 4 else codes).flatten(1), scales.flatten(1)], dim=1)


def from_bytes(packed: Tensor, shape: torch.Size, fmt: Format, dtype: torch.dtype) -> Tensor:
    """See `mx.from_bytes`."""
    size = prod(shape) * fmt.bits // 8
    codes, scales = packed[:, :size], packed[:, size:]
    codes = (unpack(codes) if fmt.bits == 4 else codes).reshape(-1, *shape)
    return decode(codes, scales.reshape(len(packed), *shape[:-1], -(-shape[-1] // BLOCK)), fmt, dtype)


def scale_values(scales: Tensor) -> Tensor:
    """2^(code - 127) of E8M0 codes uint8, FP32, NaN for 255; exact."""
    codes = scales.to(torch.int32)
    bits = torch.where(codes == 0, SUBNORMAL_SCALE, codes << FP32_MANTISSA)
    return bits.view(torch.float32).masked_fill(codes == SCALE_NAN, torch.nan)


def _blocks(x: Tensor) -> Tensor:
    """[..., n] to [..., b, 32], zeros behind a tail."""
    return pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _scale_codes(blocks: Tensor, fmt: Format, rounding: str) -> Tensor:
    """blocks FP32 [..., b, 32] to E8M0 codes uint8 [..., b]."""
    assert rounding in ROUNDINGS, rounding
    largest = blocks.abs().amax(-1)  # NaN wherever a NaN is
    bits = largest.view(torch.int32)
    if rounding == "even":
        bits = bits + (1 << FP32_MANTISSA - fmt.mantissa - 1)
    elif rounding == "ceil":
        bits = bits + ((1 << FP32_MANTISSA) - 1)
    exponents = (bits >> FP32_MANTISSA).clamp(max=SCALE_NAN)  # biased by 127, as scales are
    codes = (exponents - fmt.most).clamp(min=0)
    return codes.masked_fill(largest.isnan(), SCALE_NAN).to(torch.uint8)


def _reciprocals(scales: Tensor) -> Tensor:
    """1 / scale, FP32, exact; zero for NaN. No format's emax is below 2, so none is a subnormal number."""
    bits = (2 * 127 - scales.to(torch.int32)).clamp(min=0) << FP32_MANTISSA
    return bits.view(torch.float32)


def _e2m1_codes(elements: Tensor) -> Tensor:
    size = elements.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for place, middle in enumerate(_E2M1_MIDDLES):
        codes += size > middle if place % 2 == 0 else size >= middle
    return codes | elements.signbit().to(torch.uint8) << 3


def _e2m1_values(codes: Tensor) -> Tensor:
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)
    return table[codes.long()]


def _fp8_codes(elements: Tensor, fmt: Format) -> Tensor:
    # Not every version of torch saturates; NaN stays.
    return elements.clamp(-fmt.largest, fmt.largest).to(_FP8[fmt.name]).view(torch.uint8)

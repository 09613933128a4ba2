"""MXFP4 and MXFP8: blocks of 32 small floats under one power of two (OCP Microscaling Formats v1.0).

`reference` is the plain codec, which checkpoints use too. The functions here take the fastest backend, which
changes no bit. Backends: triton, reference. Letters: p items, n values along the last dimension.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...ops import backends
from ..formats import BLOCK, FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, ROUNDINGS, Format
from .reference import Codec

__all__ = [
    "BLOCK", "FORMATS", "MXFP4", "MXFP8_E4M3", "MXFP8_E5M2", "ROUNDINGS", "Format", "fake_quantise",
    "from_bytes", "to_bytes",
]  # fmt: skip


def fake_quantise(x: Tensor, fmt: Format, rounding: str = "floor", *, backend: str = "auto") -> Tensor:
    """x [..., n] to the values of `fmt` next to them, in its dtype; blocks lie along the last dimension.

    `rounding`: of the scales, one of ROUNDINGS. No gradient. Once more changes nothing.
    """
    return _load(backend, x.device.type, x.dtype).fake_quantise(x, fmt, rounding)


def to_bytes(x: Tensor, fmt: Format, rounding: str = "floor", *, backend: str = "auto") -> Tensor:
    """Items x [p, ..., n] to bytes uint8 [p, size]: for each its codes, and then its scales.

    E2M1 codes lie two to a byte, so that n must be even.
    """
    return _load(backend, x.device.type, x.dtype).to_bytes(x, fmt, rounding)


def from_bytes(
    packed: Tensor, shape: torch.Size, fmt: Format, dtype: torch.dtype, *, backend: str = "auto"
) -> Tensor:
    """The way back of `to_bytes`: items of `shape`, with the values that `fake_quantise` gives."""
    return _load(backend, packed.device.type, dtype).from_bytes(packed, shape, fmt, dtype)


@cache
def _load(backend: str, device_type: str, dtype: torch.dtype) -> Codec:
    codec: Codec = backends.resolve("mx", backend, device_type, dtype).load()()
    return codec

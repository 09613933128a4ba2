"""Activations in eight bits: E4M3 codes with one FP32 scale for each 128 consecutive elements.

A stored vector is one uint8 buffer: the codes, then the scales, each part rounded up to 256 bytes and filled
as if zeros followed, so that any tier keeps it as plain bytes and equal vectors are equal bytes.

Scale of a block: its largest magnitude / 448 in FP32, rounded toward zero to 20 significant bits, so that
code * scale is exact; never below 2^-116. Code: x * (1 / scale) in FP32, rounded to the nearest E4M3, ties to
even.

  error       |x - decoded| <= max(|x| / 16, 2^-18 amax, 2^-126); in FP16 its own 2^-25 more
  again       encode(decode(encode(x))) == encode(x); in FP16 for blocks whose amax is 2^-6 or more
  not finite  a block that holds NaN or infinity comes back as NaN throughout
  tiny        2^-126 and what is below it become a zero of its sign
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .layout import BLOCK, DTYPES, encoded_nbytes

__all__ = ["BLOCK", "DTYPES", "decode", "encode", "encoded_nbytes", "implementation", "triton_refuses"]


def encode(source: Tensor) -> Tensor:
    """source [n], contiguous, of one of DTYPES -> uint8 [encoded_nbytes(n)] on the same device."""
    encoded: Tensor = _module(source.device).encode(source)
    return encoded


def decode(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """What `encode` made of `numel` elements, as a new tensor [numel] of `dtype`."""
    decoded: Tensor = _module(buffer.device).decode(buffer, numel, dtype)
    return decoded


def implementation(device: torch.device) -> str:
    """Which one runs on `device`: "triton" or "reference"; the same bytes either way."""
    return "triton" if triton_refuses(device) is None else "reference"


def triton_refuses(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on `device`, or None."""
    if device.type != "cuda":
        return f"runs on cuda tensors, not {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return (
            f"needs compute capability 8.9 for E4M3, {torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken native library raises nearly anything
        return f"importing triton failed: {error}".splitlines()[0]
    return None


_chosen: dict[torch.device, ModuleType] = {}


def _module(device: torch.device) -> ModuleType:
    if device not in _chosen:
        if triton_refuses(device) is None:
            from . import triton as fused

            _chosen[device] = fused
        else:
            _chosen[device] = reference
    return _chosen[device]

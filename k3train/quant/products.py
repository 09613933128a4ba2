"""Where the products of quantised experts are computed: in their formats, or emulated."""

from __future__ import annotations

import torch

MX_CAPABILITY = (10, 0)
"""Compute capability from which tensor cores multiply MX blocks."""


def report() -> list[tuple[str, bool, str | None]]:
    """(way, can be used in this process, why not) of every way, fastest first.

    Native: tensor cores take the blocks. Emulated: the rounded numbers are multiplied in the model's dtype,
    which holds each of them exactly.
    """
    return [("native", False, _why_not()), ("emulated", True, None)]


def _why_not() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch sees none"
    capability = torch.cuda.get_device_capability()
    if capability < MX_CAPABILITY:
        least, has = (".".join(map(str, each)) for each in (MX_CAPABILITY, capability))
        return f"needs tensor cores for MX blocks (sm {least}), this device has sm {has}"
    return "not available in this version"

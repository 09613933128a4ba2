"""The rotary embedding as complex numbers, patch by patch. Letters: L patches, H heads, D head dim."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ...vision_shapes import Grid


def rotate(x: Tensor, grids: Sequence[Grid], theta: float) -> Tensor:
    """x [L, H, D], patches of each item in the order (t, h, w); FP32 inside, or FP64 for FP64 inputs."""
    width = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, width, 4, dtype=torch.float64) / width)
    places = [place for t, h, w in grids for place in product(range(t), range(h), range(w))]
    rows = []
    for values, (_, row, column) in zip(
        x.to(torch.promote_types(x.dtype, torch.float32)), places, strict=True
    ):
        pairs = torch.view_as_complex(values.unflatten(-1, (-1, 2)).contiguous())  # [H, D/2]
        phases = torch.stack((column * frequencies, row * frequencies), dim=-1).flatten()
        turn = torch.polar(torch.ones_like(phases), phases).to(pairs)
        rows.append(torch.view_as_real(pairs * turn).flatten(-2))
    return torch.stack(rows).to(x.dtype)

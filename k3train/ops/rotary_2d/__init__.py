"""Rotary embedding over the rows and columns of a grid of patches.

Source: RoFormer (arXiv:2104.09864) along two axes, in MoonViT's order of channels. Two neighbouring channels
are a pair. Pair 2i of a head turns by x * theta^(-4i/D) and pair 2i + 1 by y * theta^(-4i/D), x the column
and y the row of the patch. All frames of a clip turn alike.
Letters: L patches of all packed items, H heads, D head dim, h, w rows and columns of an item.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...vision_context import Piece
from ..items import Items

__all__ = ["RotaryTable", "rotary_table", "rotate"]


class RotaryTable(NamedTuple):
    """Cosine and sine of every patch's angles: each [L, 1, D/2]."""

    cos: Tensor
    sin: Tensor


def rotary_table(items: Items, head_dim: int, theta: float, dtype: torch.dtype) -> RotaryTable:
    """Angles in FP64, then cosine and sine in FP32, or in FP64 for FP64 activations."""
    powers = torch.arange(0, head_dim, 4, dtype=torch.float64, device=items.device) / head_dim
    frequencies = theta**-powers  # [D/4]
    angles = items.spread([_angles(piece, frequencies) for piece, _ in items.runs])
    wide = torch.promote_types(dtype, torch.float32)
    return RotaryTable(angles.cos().to(wide)[:, None], angles.sin().to(wide)[:, None])


def _angles(piece: Piece, frequencies: Tensor) -> Tensor:
    """Angles of one piece's patches: [t * h * w, D/2]."""
    t, h, w = piece.local
    x = torch.arange(w, dtype=torch.float64, device=frequencies.device)
    y = torch.arange(piece.first, piece.stop, dtype=torch.float64, device=frequencies.device)
    columns = (x[:, None] * frequencies).expand(t, h, -1, -1)  # [t, h, w, D/4]
    rows = (y[:, None, None] * frequencies).expand(t, -1, w, -1)
    return torch.stack((columns, rows), dim=-1).flatten(3).flatten(0, 2)


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Turn every channel pair of x [L, H, D] by its patch's angle; x's dtype is kept."""
    even, odd = x.to(table.cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)  # [L, H, D/2]
    turned = (even * table.cos - odd * table.sin, even * table.sin + odd * table.cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)

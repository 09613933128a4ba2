"""Learned positions of the patches of an item: a square grid, resized, and a fixed wave over time.

Source: MoonViT (arXiv:2504.07491) for the grid, Kimi K2.5 (arXiv:2602.02276) for the time. The resize is
bilinear without anti-aliasing, with pixel centres at halves. It is two products with small matrices: a GPU
would sum the gradient of a gather in any order, and that of a product in one.
Letters: G side of the learned grid, d hidden, L patches of all packed items, t, h, w frames, rows, columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...vision_context import Piece
from ..items import Items

__all__ = ["interpolation", "position_grid", "resize", "time_wave"]

TIME_BASE = 1e4


def position_grid(weight: Tensor, items: Items) -> Tensor:
    """Position of every patch from the grid [G, G, d]: [L, d] of weight's dtype, summed in FP32 or wider."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return items.spread([_piece(wide, piece) for piece, _ in items.runs]).to(weight.dtype)


def _piece(weight: Tensor, piece: Piece) -> Tensor:
    """Positions of one piece: [its patches, d]."""
    t, h, w = piece.grid
    spatial = resize(weight, h, w, slice(piece.first, piece.stop)).flatten(0, 1)
    if t == 1:
        return spatial
    return (spatial + time_wave(t, weight.shape[-1], weight)[:, None]).flatten(0, 1)


def resize(weight: Tensor, h: int, w: int, rows: slice = slice(None)) -> Tensor:
    """Bilinear resize of weight [G, G, d] to [h, w, d], and `rows` of it; its own size changes nothing."""
    side = weight.shape[0]
    if (h, w) == (side, side):
        return weight[rows]
    heights = interpolation(side, h, weight)[rows]
    resized = (heights @ weight.flatten(1)).unflatten(1, weight.shape[1:])  # [h, G, d]
    return interpolation(side, w, weight) @ resized


def interpolation(old: int, new: int, like: Tensor) -> Tensor:
    """Weights [new, old] that resample `old` points into `new`, of the dtype and on the device of `like`."""
    wanted = torch.arange(new, dtype=torch.float64, device=like.device)
    source = ((wanted + 0.5) * (old / new) - 0.5).clamp(0, old - 1)
    distance = source[:, None] - torch.arange(old, dtype=torch.float64, device=like.device)
    return (1 - distance.abs()).clamp(min=0).to(like.dtype)


def time_wave(frames: int, size: int, like: Tensor) -> Tensor:
    """[frames, size]: the sines of a frame's number times 1e4^(-2i/size), then the cosines."""
    index = torch.arange(size // 2, dtype=torch.float64, device=like.device)
    frequencies = TIME_BASE ** (-index / (size // 2))
    angles = torch.arange(frames, dtype=torch.float64, device=like.device)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(like.dtype)

"""MoonViT-V2 and its projector once more, from the specification alone: plain PyTorch, item by item.

Takes weights by their global names. Letters: L patches of one item, d hidden, H heads, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3train.vision_config import VisionConfig

Weights = dict[str, Tensor]
Grid = tuple[int, int, int]


def forward(vision: VisionConfig, weights: Weights, patches: Tensor, grids: list[Grid]) -> Tensor:
    """Embeddings [tokens, o] of all items of patches [sum of t*h*w, 3 * 14 * 14]."""
    outputs, start = [], 0
    for t, h, w in grids:
        outputs.append(_item(vision, weights, patches[start : start + t * h * w], (t, h, w)))
        start += t * h * w
    return torch.cat(outputs)


def _item(vision: VisionConfig, w: Weights, patches: Tensor, grid: Grid) -> Tensor:
    filters = w["vision.tower.patch_embed.proj.weight"].view(-1, 3, vision.patch_size, vision.patch_size)
    images = patches.view(-1, 3, vision.patch_size, vision.patch_size)
    x = torch.nn.functional.conv2d(images, filters).flatten(1)  # [L, d]
    x = x + _positions(w["vision.tower.patch_embed.pos_emb.weight"], grid)
    for block in range(vision.depth):
        path = f"vision.tower.encoder.blocks.{block}."
        x = x + _attention(vision, w, path, _rms(x, w[path + "norm0.weight"], 1e-5), grid)
        y = _rms(x, w[path + "norm1.weight"], 1e-5) @ w[path + "mlp.fc0.weight"].T
        x = x + _tanh_gelu(y) @ w[path + "mlp.fc1.weight"].T
    x = _rms(x, w["vision.tower.encoder.final_layernorm.weight"], 1e-5)
    hidden = _merge(x, grid) @ w["vision.projector.proj.0.weight"].T
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return _rms(hidden @ w["vision.projector.proj.2.weight"].T, w["vision.projector.post_norm.weight"], 1e-5)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _positions(grid_weight: Tensor, grid: Grid) -> Tensor:
    t, h, w = grid
    side, _, d = grid_weight.shape
    rows = []
    for frame in range(t):
        wave = torch.zeros(d, dtype=grid_weight.dtype)
        if t > 1:
            angles = [frame / 10000 ** (i / (d // 2)) for i in range(d // 2)]
            wave = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=grid_weight.dtype)
        for y in range(h):
            for x in range(w):
                (y0, y1, fy), (x0, x1, fx) = _between(y, h, side), _between(x, w, side)
                above = (1 - fx) * grid_weight[y0, x0] + fx * grid_weight[y0, x1]
                below = (1 - fx) * grid_weight[y1, x0] + fx * grid_weight[y1, x1]
                rows.append((1 - fy) * above + fy * below + wave)
    return torch.stack(rows)


def _between(index: int, new: int, old: int) -> tuple[int, int, float]:
    """The two points of the old axis around a point of the new one, and the share of the second."""
    place = max((index + 0.5) * old / new - 0.5, 0.0)
    low = int(place)
    return low, min(low + 1, old - 1), place - low


def _attention(vision: VisionConfig, w: Weights, path: str, x: Tensor, grid: Grid) -> Tensor:
    heads, width = vision.num_heads, vision.head_dim
    q, k, v = (x @ w[path + "wqkv.weight"].T).view(len(x), 3, heads, width).unbind(1)
    turns = torch.stack([_turn(vision, *place) for place in _places(grid)])  # [L, D, D]
    q, k = (torch.einsum("lij,lhj->lhi", turns, y) for y in (q, k))
    outputs = [
        torch.softmax(q[:, head] @ k[:, head].T / math.sqrt(width), -1) @ v[:, head] for head in range(heads)
    ]
    return torch.cat(outputs, -1) @ w[path + "wo.weight"].T


def _places(grid: Grid) -> list[tuple[int, int]]:
    t, h, w = grid
    return [(y, x) for _ in range(t) for y in range(h) for x in range(w)]


def _turn(vision: VisionConfig, y: int, x: int) -> Tensor:
    """The rotation of one head at row y and column x as a matrix [D, D]."""
    width = vision.head_dim
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for pair in range(width // 2):
        angle = (x if pair % 2 == 0 else y) * vision.rope_theta ** (-4 * (pair // 2) / width)
        cos, sin, i = math.cos(angle), math.sin(angle), 2 * pair
        matrix[i, i], matrix[i, i + 1], matrix[i + 1, i], matrix[i + 1, i + 1] = cos, -sin, sin, cos
    return matrix


def _merge(x: Tensor, grid: Grid) -> Tensor:
    t, h, w = grid
    mean = sum(x[frame * h * w : (frame + 1) * h * w] for frame in range(t)) / t
    rows = []
    for y in range(0, h, 2):
        for column in range(0, w, 2):
            corner = y * w + column
            rows.append(torch.cat([mean[corner], mean[corner + 1], mean[corner + w], mean[corner + w + 1]]))
    return torch.stack(rows)

"""Parameters, FLOPs and bytes of the vision tower and its projector, without building them.

An item is an image or a short clip, cut into a grid (t, h, w): frames, rows and columns of patches. FLOPs
follow the conventions of `flops`: a multiply and an add are two, norms and activations do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .errors import UserError
from .flops import BACKWARD_OVER_FORWARD
from .shapes import Parameter
from .vision_config import VisionConfig

Grid = tuple[int, int, int]
PREFIX = "vision"
"""First part of every parameter's global name."""


class GridError(UserError):
    """An item whose grid of patches the tower cannot take."""


def patches(grid: Grid) -> int:
    """Patches of one item, its frames counted."""
    t, h, w = grid
    return t * h * w


def tokens(vision: VisionConfig, grid: Grid) -> int:
    """Embeddings that one item becomes: frames are averaged and neighbours merged."""
    _, h, w = grid
    return (h // vision.merge) * (w // vision.merge)


def check_grid(vision: VisionConfig, grid: Grid, item: int = 0) -> None:
    """Refuse a grid that the tower cannot take.

    Raises GridError, which names the item, its grid, the limit and the remedy.
    """
    t, h, w = grid
    side = f"{vision.merge * vision.patch_size} pixels"
    if min(grid) < 1:
        reason = f"every side must be at least 1; resize the item to at least {side} a side"
    elif t > vision.max_frames:
        reason = f"{t} frames exceed vision.max_frames={vision.max_frames}; cut the clip"
    elif h % vision.merge or w % vision.merge:
        reason = f"{h} x {w} does not divide by vision.merge={vision.merge}; pad to multiples of {side}"
    elif max(h, w) > vision.rope_max:
        reason = f"a side exceeds vision.rope_max={vision.rope_max}; scale the item down"
    elif patches(grid) > vision.max_patches:
        reason = (
            f"{patches(grid)} patches exceed vision.max_patches={vision.max_patches}; scale the item down"
        )
    else:
        return
    raise GridError(f"item {item}: grid (t, h, w) = {(t, h, w)}: {reason}")


def check_grids(vision: VisionConfig, grids: Sequence[Grid], rows: int) -> None:
    """Refuse a pack whose items are not valid or do not add up to its `rows` patches; raises GridError."""
    for item, grid in enumerate(grids):
        check_grid(vision, grid, item)
    needed = sum(patches(grid) for grid in grids)
    if needed != rows:
        raise GridError(f"the grids of {len(grids)} items need {needed} patches, and {rows} are given")


def attention_channels(vision: VisionConfig) -> int:
    """Channels of the queries of all heads."""
    return vision.num_heads * vision.head_dim


def patch_values(vision: VisionConfig) -> int:
    """Numbers in one patch, ordered (channel, row, column)."""
    return vision.channels * vision.patch_size**2


def parameters(vision: VisionConfig, out_size: int, dtype: str = "fp32") -> Iterator[Parameter]:
    """Every parameter of the tower (kind "vision") and the projector (kind "projector"), in order.

    Args:
        out_size: width of the language model.
        dtype: fp32 or bf16.
    """
    d, side = vision.hidden_size, vision.grid_size
    merged = vision.merge**2 * d
    yield Parameter(f"{PREFIX}.tower.patch_embed.proj.weight", (d, patch_values(vision)), dtype, "vision")
    yield Parameter(f"{PREFIX}.tower.patch_embed.pos_emb.weight", (side, side, d), dtype, "vision")
    for block in range(vision.depth):
        for name, shape in _block_shapes(vision).items():
            path = f"{PREFIX}.tower.encoder.blocks.{block}.{name}.weight"
            yield Parameter(path, shape, dtype, "vision")
    yield Parameter(f"{PREFIX}.tower.encoder.final_layernorm.weight", (d,), dtype, "vision")
    yield Parameter(f"{PREFIX}.projector.proj.0.weight", (merged, merged), dtype, "projector")
    yield Parameter(f"{PREFIX}.projector.proj.2.weight", (out_size, merged), dtype, "projector")
    yield Parameter(f"{PREFIX}.projector.post_norm.weight", (out_size,), dtype, "projector")


def _block_shapes(vision: VisionConfig) -> dict[str, tuple[int, ...]]:
    d, channels = vision.hidden_size, attention_channels(vision)
    return {
        "norm0": (d,),
        "wqkv": (3 * channels, d),
        "wo": (d, channels),
        "norm1": (d,),
        "mlp.fc0": (vision.ffn_size, d),
        "mlp.fc1": (d, vision.ffn_size),
    }


def count_by_kind(vision: VisionConfig, out_size: int) -> dict[str, int]:
    """Parameters of the tower under "vision" and of the projector under "projector"."""
    counts = {"vision": 0, "projector": 0}
    for entry in parameters(vision, out_size):
        counts[entry.kind] += entry.numel
    return counts


def forward_flops(vision: VisionConfig, out_size: int, grid: Grid) -> dict[str, float]:
    """FLOPs of the forward pass of one item, by site; "vision_core" grows with the square of its patches."""
    length, d, channels = patches(grid), vision.hidden_size, attention_channels(vision)
    merged = vision.merge**2 * d
    linear = 4 * d * channels + 2 * d * vision.ffn_size
    return {
        "vision_embedding": 2.0 * length * d * patch_values(vision),
        "vision_projection": 2.0 * length * vision.depth * linear,
        "vision_core": 2.0 * length**2 * vision.depth * 2 * channels,
        "projector": 2.0 * tokens(vision, grid) * merged * (merged + out_size),
    }


def image_cost(vision: VisionConfig, out_size: int, grid: Grid) -> float:
    """Cost by which items are balanced over bundles: the FLOPs of the forward pass."""
    return sum(forward_flops(vision, out_size, grid).values())


def train_flops(vision: VisionConfig, out_size: int, grids: Iterable[Grid]) -> float:
    """FLOPs of forward and backward of all items; a recomputed forward is not counted."""
    return (1 + BACKWARD_OVER_FORWARD) * sum(image_cost(vision, out_size, grid) for grid in grids)

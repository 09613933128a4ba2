"""MoonViT-V2: a vision transformer over packed images and clips of any resolution, and its projector.

Source: Kimi K3 report; MoonViT (arXiv:2504.07491). One joint attention over all patches of an item, as in the
released tower; the report describes it factorised into space and time.
Letters: L patches of all packed items or pieces of them, p numbers in a patch, n tokens, d hidden, H heads,
D head dim, m merge, o width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from offload.sites import region, site

from ..ops.backends import current_device
from ..ops.item_attention import item_attention
from ..ops.items import Items, Share
from ..ops.position_grid import position_grid
from ..ops.rotary_2d import RotaryTable, rotary_table, rotate
from ..vision_config import VisionConfig
from ..vision_shapes import Grid, attention_channels, check_grids, patch_values, tokens
from .norm import RMSNorm
from .projector import Projector, plain_linear


class VisionModel(nn.Module):
    """Tower and projector. Every rank that holds it holds all of it; what may be cut are images.

    Args:
        config: shape of the tower.
        out_size: width of the language model.
        dtype: dtype of parameters and activations; rotary angles and norm statistics are FP32 or wider.
    """

    def __init__(self, config: VisionConfig, out_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.out_size = config, out_size
        self.tower = VisionTower(config, dtype)
        self.projector = Projector(config, out_size, dtype)

    def forward(
        self, patches: Tensor, grids: Sequence[Grid], share: Share | None = None
    ) -> tuple[Tensor, list[int]]:
        """Embed packed items; with `share` a collective of its group.

        Args:
            patches: [L, p], each patch flattened from (channel, row, column), patches of an item in the order
                (t, h, w), items one behind another; cast to the tower's dtype.
            grids: (t, h, w) of each item, on the host.
            share: what this rank has of the items, where a context group works on them together; `patches`
                are those of its pieces.

        Returns:
            embeddings [n, o] in the order of the items, and the number of embeddings of each item, or of the
            pieces that are here. Without items the result is empty and no parameter has a part in it.

        Raises:
            GridError: a grid is out of bounds, or the grids do not add up to L.
        """
        if share is None:
            check_grids(self.config, grids, patches.shape[0])
        if not grids:
            return patches.new_zeros(0, self.out_size, dtype=self.projector.post_norm.weight.dtype), []
        device = patches.device
        items = Items.pack(grids, device) if share is None else Items.of(share, device)
        with site("vit"):
            features = self.tower(patches, items)
            with site("projector"):
                embeddings = self.projector(merge_patches(features, items, self.config.merge))
        return embeddings, [tokens(self.config, piece.local) for piece in items.pieces]


class VisionTower(nn.Module):
    """Patch embedding, positions, blocks, final norm."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config, dtype)
        self.encoder = Encoder(config, dtype)

    def forward(self, patches: Tensor, items: Items) -> Tensor:
        """patches [L, p] to features [L, d]."""
        with site("input"):
            x = self.patch_embed(patches, items)
        table = rotary_table(items, self.config.head_dim, self.config.rope_theta, x.dtype)
        return self.encoder(x, table, items)


class PatchEmbedding(nn.Module):
    """A linear of each patch, the convolution of the released tower written flat, and its position."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = plain_linear(patch_values(config), config.hidden_size, dtype)
        self.pos_emb = PositionGrid(config, dtype)

    def forward(self, patches: Tensor, items: Items) -> Tensor:
        """patches [L, p] to [L, d]."""
        positions = self.pos_emb(items)
        return self.proj(patches.to(positions.dtype)) + positions


class PositionGrid(nn.Module):
    """The learned grid of positions, weight [G, G, d]."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (config.grid_size, config.grid_size, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=current_device()))

    def forward(self, items: Items) -> Tensor:
        """Positions of all patches: [L, d]."""
        return position_grid(self.weight, items)


class Encoder(nn.Module):
    """The blocks and the norm behind them."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(VisionBlock(config, dtype) for _ in range(config.depth))
        self.final_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def forward(self, x: Tensor, table: RotaryTable, items: Items) -> Tensor:
        """x [L, d] to [L, d]."""
        for block in self.blocks:
            x = region("layer", partial(block, table, items), x, keep_results=True)
        with site("projector"):
            return self.final_layernorm(x)  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    """Pre-norm attention and feed-forward, without biases."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        channels = attention_channels(config)
        self.norm0 = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.wqkv = plain_linear(config.hidden_size, 3 * channels, dtype)
        self.wo = plain_linear(channels, config.hidden_size, dtype)
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = VisionMLP(config, dtype)

    def forward(self, table: RotaryTable, items: Items, x: Tensor) -> Tensor:
        """x [L, d] to [L, d]."""
        q, k, v = region("qkv", partial(self._project, table), region("norm", self.norm0, x))
        attended = region("core", partial(self._attend, items), q, k, v)
        with site("output"):
            x = x + self.wo(attended)
        return x + self.mlp(region("norm", self.norm1, x))

    def _project(self, table: RotaryTable, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values of x [L, d]: [L, H, D] each."""
        heads = self.config.num_heads
        qkv = self.wqkv(x).unflatten(-1, (3 * heads, self.config.head_dim))  # [L, 3 H, D]
        q, k = rotate(qkv[:, : 2 * heads], table).chunk(2, dim=1)
        # A copy: kept as a view for backward, v would hold the unrotated q and k in memory.
        return q, k, qkv[:, 2 * heads :].contiguous()

    def _attend(self, items: Items, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[L, H * D]."""
        return item_attention(q, k, v, items, backend=self.config.attention).flatten(1)


class VisionMLP(nn.Module):
    """Linear, GELU (tanh), linear."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc0 = plain_linear(config.hidden_size, config.ffn_size, dtype)
        self.fc1 = plain_linear(config.ffn_size, config.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [L, d] to [L, d]."""
        up = region("ffn", self.fc0, x)
        activated = region("activation", partial(gelu, approximate="tanh"), up)
        with site("ffn_output"):
            return self.fc1(activated)  # type: ignore[no-any-return]


def merge_patches(x: Tensor, items: Items, merge: int) -> Tensor:
    """Average each piece's frames, then join merge x merge neighbours: x [L, d] to [n, merge * merge * d].

    Neighbours stand in the order (row, column), tokens too.
    """
    merged = []
    for (t, h, w), part in items.split(x):
        cut = part.unflatten(1, (t, h // merge, merge, w // merge, merge)).mean(
            1
        )  # [items, h / m, m, w / m, m, d]
        merged.append(cut.transpose(2, 3).flatten(3).flatten(0, 2))
    return torch.cat(merged)

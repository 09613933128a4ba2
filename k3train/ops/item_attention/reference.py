"""Attention under a block-diagonal mask, with the softmax written out.

Letters: L patches, K keys, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..items import Items


def item_attention(q: Tensor, k: Tensor, v: Tensor, items: Items) -> Tensor:
    """See `ops.item_attention.item_attention`; computed in FP32, or in FP64 for FP64 inputs."""
    wide = torch.promote_types(q.dtype, torch.float32)
    owner, key_owner = (
        torch.repeat_interleave(torch.tensor(lengths)).to(q.device)
        for lengths in (items.lengths, items.key_lengths)
    )  # [L], [K]
    logits = torch.einsum("ihd,jhd->hij", q.to(wide), k.to(wide)) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(owner[:, None] != key_owner[None, :], float("-inf"))
    return torch.einsum("hij,jhd->ihd", logits.softmax(-1), v.to(wide)).to(v.dtype)

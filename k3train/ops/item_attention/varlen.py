"""Attention through torch's variable-length FlashAttention. Letters: L patches, H heads, D head dim."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from ..items import Items


def item_attention(q: Tensor, k: Tensor, v: Tensor, items: Items) -> Tensor:
    """See `ops.item_attention.item_attention`; the output has v's dtype."""
    longest, most_keys = max(items.lengths), max(items.key_lengths)
    output = varlen_attn(q, k, v, items.cu_seqlens, items.cu_keys, longest, most_keys)
    assert isinstance(output, Tensor)
    return output

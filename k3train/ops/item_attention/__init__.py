"""Softmax attention of all patches of one item with each other.

Letters: L patches of all packed items, H heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from .. import backends
from ..items import Items

__all__ = ["item_attention"]


def item_attention(q: Tensor, k: Tensor, v: Tensor, items: Items, backend: str = "auto") -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the patches of the same item: q, k, v and result [L, H, D].

    Backends: varlen (torch's variable-length FlashAttention), sdpa (one call for each run of items of equal
    length), reference.
    """
    output: Tensor = backends.call("item_attention", backend, q, q, k, v, items)
    return output

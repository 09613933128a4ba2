"""Softmax attention of all patches of one item with each other.

Letters: L patches of all packed items or pieces of them, H heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from .. import backends
from ..items import Items
from .gather import gather_keys

__all__ = ["item_attention"]


def item_attention(q: Tensor, k: Tensor, v: Tensor, items: Items, backend: str = "auto") -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the patches of the same item: q, k, v and result [L, H, D].

    Keys and values of items that lie on several ranks are exchanged first, a collective of their group.
    Backends: varlen (torch's variable-length FlashAttention), sdpa (one call for each run of items of equal
    length), reference.
    """
    if items.share is not None and items.share.plan is not None:
        k, v = gather_keys(k, v, items.share.plan, items.share.group)
    if not q.shape[0]:
        # Nothing is here, but backward has to come through the exchange.
        return q + k + v
    output: Tensor = backends.call("item_attention", backend, q, q, k, v, items)
    return output

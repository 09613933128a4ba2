"""Attention through torch's scaled_dot_product_attention, items of equal length batched.

Letters: L patches, H heads, D head dim, n items of one run, l patches of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..items import Items


def item_attention(q: Tensor, k: Tensor, v: Tensor, items: Items) -> Tensor:
    """See `ops.item_attention.item_attention`; the output has v's dtype."""
    rows, keys = ([each[side] * count for each, count in items.length_runs] for side in (0, 1))
    outputs = []
    for ((length, key_length), count), *parts in zip(
        items.length_runs, q.split(rows), k.split(keys), v.split(keys), strict=True
    ):
        batch = [
            part.unflatten(0, (count, size)).transpose(1, 2)
            for part, size in zip(parts, (length, key_length, key_length), strict=True)
        ]  # [n, H, l, D]
        outputs.append(F.scaled_dot_product_attention(*batch).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)

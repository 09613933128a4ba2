"""Attention through torch's scaled_dot_product_attention.

Letters: b batch, s sequence, H heads, Dq, Dv head dims.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..packing import Packing
from .fragments import Fragments


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, packing: Packing | Fragments
) -> Tensor:
    """See `ops.attention.causal_attention`; the output has v's dtype."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, H, s, D]
    mask = None if packing.whole_rows else packing.attention_mask
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return output.transpose(1, 2)

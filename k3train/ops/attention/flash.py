"""Attention through the variable-length FlashAttention kernel inside torch.

The kernel wants one head dim, so the narrower tensors are padded with zeros, which changes no result. With
more keys than queries, causal means to it what it means to `Fragments`: since FlashAttention 2.1 the mask is
aligned to the last query and the last key.
Letters: b batch, s sequence, H heads, Dq, Dv head dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import Packing
from .fragments import Fragments, borders


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, packing: Packing | Fragments
) -> Tensor:
    """See `ops.attention.causal_attention`; the output has v's dtype."""
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    padded = (F.pad(x.flatten(0, 1), (0, width - x.shape[-1])) for x in (q, k, v))  # [b*s, H, width]
    output = torch.ops.aten._flash_attention_forward(
        *padded, *borders(packing), 0.0, True, False, scale=scale
    )[0]
    return output[..., : v.shape[-1]].reshape(*q.shape[:3], v.shape[-1])

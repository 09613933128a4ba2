"""Attention through the variable-length FlashAttention kernel inside torch.

The kernel wants one head dim, so the narrower tensors are padded with zeros, which changes no result.
Letters: b batch, s sequence, H heads, Dq, Dv head dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import Packing


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, packing: Packing) -> Tensor:
    """See `ops.attention.causal_attention`; the output has v's dtype."""
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    padded = (F.pad(x.flatten(0, 1), (0, width - x.shape[-1])) for x in (q, k, v))  # [b*s, H, width]
    borders, longest = packing.cu_seqlens, packing.max_seqlen
    output = torch.ops.aten._flash_attention_forward(
        *padded, borders, borders, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return output[..., : v.shape[-1]].reshape(v.shape)

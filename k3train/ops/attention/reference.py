"""Attention with the softmax written out.

Letters: b batch, s queries, t keys, H heads, Dq, Dv head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing import Packing
from .fragments import Fragments


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, packing: Packing | Fragments
) -> Tensor:
    """See `ops.attention.causal_attention`; the output is FP32, or FP64 for FP64 inputs."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    logits = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    weights = logits.masked_fill(~packing.attention_mask, float("-inf")).softmax(-1)  # [b, H, s, t]
    return torch.einsum("bhij,bjhv->bihv", weights, v)

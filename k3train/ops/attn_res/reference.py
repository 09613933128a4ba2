"""AttnRes by autograd, on stacked sources. Letters: L sources, d hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `ops.attn_res.attn_res`."""
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    values = torch.stack(tuple(sources)).to(dtype)  # [L, ..., d]
    normed = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    logits = (normed * (query.to(dtype) * norm_weight.to(dtype))).sum(-1)  # [L, ...]
    return (logits.softmax(0)[..., None] * values).sum(0).to(sources[0].dtype)

"""Attention through the variable-length FlashAttention kernel inside torch.

The kernel wants one head dim, so the narrower tensors are padded with zeros, which changes no result. What is
kept for backward are the tensors as they were given, so that a caller who can make keys and values again may
free them; they are padded once more there. With more keys than queries, causal means to the kernel what it
means to `Fragments`: since FlashAttention 2.1 the mask is aligned to the last query and the last key.
Letters: b batch, s sequence, H heads, Dq, Dv head dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import Packing
from .fragments import Fragments, borders


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, packing: Packing | Fragments
) -> Tensor:
    """See `ops.attention.causal_attention`; the output has v's dtype."""
    rows = [x.flatten(0, 1) for x in (q, k, v)]  # [b*s, H, D]
    output: Tensor = _Padded.apply(*rows, scale, packing)
    return output.view(*q.shape[:3], v.shape[-1])


class _Padded(torch.autograd.Function):
    """The kernel between padding and its opposite."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing | Fragments
    ) -> Tensor:
        output, logsumexp, random_state, unused, _ = torch.ops.aten._flash_attention_forward(
            *_as_wide(q, k, v), *borders(packing), 0.0, True, False, scale=scale
        )
        output = output[..., : v.shape[-1]].contiguous()
        ctx.save_for_backward(q, k, v, output, logsumexp, random_state, unused)
        ctx.scale, ctx.packing = scale, packing
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp, random_state, unused = ctx.saved_tensors
        queries, keys, values, result, gradient = _as_wide(q, k, v, output, grads[0])
        found = torch.ops.aten._flash_attention_backward(
            gradient, queries, keys, values, result, logsumexp, *borders(ctx.packing), 0.0, True,
            random_state, unused, scale=ctx.scale,
        )  # fmt: skip
        dq, dk, dv = (x[..., : like.shape[-1]] for x, like in zip(found, (q, k, v), strict=True))
        return dq, dk, dv, None, None


def _as_wide(*tensors: Tensor) -> list[Tensor]:
    """All padded to the widest, to a multiple of 8."""
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [F.pad(x, (0, width - x.shape[-1])) for x in tensors]

"""The plain-PyTorch backends of `delta_attention`, and the two small functions in front of the core.

Letters: b batch, s sequence, H heads, D key head dim, Dv value head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..packing import Packing
from . import chunk, reference
from .context import Handover
from .context_reference import recurrent_kda_over_ranks


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension; FP32 inside, x's dtype outside."""
    full = x.to(reference.compute_dtype(x))
    return (full * (full.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class _Gate(torch.autograd.Function):
    """`reference.gate` that keeps z and its own result only."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
        g = reference.gate(z, A_log, dt_bias, lower_bound)
        ctx.save_for_backward(z, A_log, dt_bias, g)
        ctx.lower_bound = lower_bound
        return g

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, A_log, dt_bias, g = ctx.saved_tensors
        slope = A_log.to(g.dtype).exp()[:, None]
        grad_z = grads[0] * slope * g * (1 - g / ctx.lower_bound)  # [b, s, H, D]
        biased = z.to(g.dtype) + dt_bias.to(g.dtype).view(z.shape[-2:])
        grad_A = (grad_z * biased).sum((0, 1, 3)).to(A_log.dtype)
        return grad_z.to(z.dtype), grad_A, grad_z.sum((0, 1)).flatten().to(dt_bias.dtype), None


def kda_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log-decay lower_bound * sigmoid(exp(A_log) * (z + dt_bias)), FP32, in (lower_bound, 0).

    z [b, s, H, D]; A_log [H]; dt_bias [H*D] -> [b, s, H, D]. K3 report (arXiv:2607.24653).
    """
    g: Tensor = _Gate.apply(z, A_log, dt_bias, lower_bound)
    return g


def _attend(
    core: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float,
    packing: Packing,
) -> Tensor:
    dtype = reference.compute_dtype(q, k, v)
    g = kda_gate(z, A_log, dt_bias, lower_bound)
    document_ids = None if packing.whole_rows else packing.document_ids
    q, k = l2norm(q.to(dtype)), l2norm(k.to(dtype))
    keywords: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "document_ids": document_ids}
    if (handover := Handover.of(packing)) is not None:
        keywords["handover"] = handover
    output, _ = core(q, k, v, g, beta, **keywords)
    return output.to(v.dtype)


def delta_attention_chunk(*args: Any, **kwargs: Any) -> Tensor:
    """`delta_attention` with the chunk form."""
    return _attend(chunk.chunk_kda, *args, **kwargs)


def delta_attention_recurrent(*args: Any, **kwargs: Any) -> Tensor:
    """`delta_attention` token by token."""
    alone = kwargs["packing"].span is None
    return _attend(reference.recurrent_kda if alone else recurrent_kda_over_ranks, *args, **kwargs)

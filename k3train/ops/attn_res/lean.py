"""AttnRes with its gradient by hand: keeps the sources themselves and two numbers per token and source.

Each source is read where it lies; nothing is stacked. No sum mixes tokens or changes its order with their
number, so a token's result does not depend on its neighbours. Attention Residuals (arXiv:2603.15031).
Letters: L sources, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def attn_res(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `ops.attn_res.attn_res`."""
    output: Tensor = _AttnRes.apply(query, norm_weight, eps, *sources)
    return output


def _sum_sources(x: Tensor) -> Tensor:
    """Sum over the first dimension in its order; torch's own order varies with the number of tokens."""
    total = x[0]
    for row in x[1:]:
        total = total + row
    return total


def _softmax(logit: Tensor) -> Tensor:
    exponentials = (logit - logit.amax(0)).exp()
    return exponentials / _sum_sources(exponentials)


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, norm_weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        dtype = torch.promote_types(sources[0].dtype, torch.float32)
        key = query.to(dtype) * norm_weight.to(dtype)
        logits, scales = [], []
        for source in sources:
            value = source.to(dtype)
            scales.append((value.square().mean(-1) + eps).rsqrt())
            logits.append((value * key).sum(-1) * scales[-1])
        logit, scale = torch.stack(logits), torch.stack(scales)  # [L, ...]
        weights = _softmax(logit)
        output = weights[0, ..., None] * sources[0]
        for weight, source in zip(weights[1:], sources[1:], strict=True):
            output.addcmul_(weight[..., None], source.to(dtype))
        ctx.save_for_backward(query, norm_weight, logit, scale, *sources)
        return output.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, norm_weight, logit, scale, *sources = ctx.saved_tensors
        dtype = logit.dtype
        key = query.to(dtype) * norm_weight.to(dtype)
        grad = grads[0].to(dtype)
        weights = _softmax(logit)
        aligned = torch.stack([(source.to(dtype) * grad).sum(-1) for source in sources])  # [L, ...]
        grad_logit = weights * (aligned - _sum_sources(weights * aligned))
        along_key = grad_logit * scale
        along_value = along_key * scale * logit / key.numel()
        grad_key = torch.zeros_like(key)
        grad_sources: list[Tensor | None] = []
        for i, source in enumerate(sources):
            value = source.to(dtype)
            grad_key += along_key[i].flatten() @ value.flatten(0, -2)
            if not ctx.needs_input_grad[3 + i]:
                grad_sources.append(None)
                continue
            grad_source = weights[i, ..., None] * grad
            grad_source.addcmul_(along_key[i, ..., None], key)
            grad_source.addcmul_(along_value[i, ..., None], value, value=-1)
            grad_sources.append(grad_source.to(source.dtype))
        grad_query = (norm_weight.to(dtype) * grad_key).to(query.dtype)
        grad_norm_weight = (query.to(dtype) * grad_key).to(norm_weight.dtype)
        return grad_query, grad_norm_weight, None, *grad_sources

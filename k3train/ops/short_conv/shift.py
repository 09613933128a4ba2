"""The short convolution as K shifted products with a gradient by hand; keeps its input only.

Letters: b batch, s sequence, C channels, K kernel size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..packing import Packing
from .halo import with_halo


def short_conv(x: Tensor, weight: Tensor, packing: Packing, halo: Tensor | None = None) -> Tensor:
    """See `ops.short_conv.short_conv`; `halo` [b, K - 1, C] are the columns before those of x."""
    rows, document_ids = with_halo(x, None if packing.whole_rows else packing.document_ids, halo)
    output: Tensor = _ShortConv.apply(rows, weight, document_ids)
    return output if halo is None else output[:, halo.shape[1] :]


def _convolve(x: Tensor, taps: Tensor, document_ids: Tensor | None) -> Tensor:
    """sum_j taps[j] * x shifted j tokens later; x [b, s, C], taps [K, C]."""
    output = x * taps[0]
    for j in range(1, min(taps.shape[0], x.shape[1])):
        output[:, j:].addcmul_(_history(x[:, :-j], document_ids, j), taps[j])
    return output


def _history(x: Tensor, document_ids: Tensor | None, j: int) -> Tensor:
    """Zero where token t and token t + j lie in different documents; x [b, s - j, C]."""
    if document_ids is None:
        return x
    return x * (document_ids[:, j:] == document_ids[:, :-j])[..., None]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, document_ids: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, document_ids)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        taps = weight[:, 0].to(dtype).t().flip(0)  # [K, C], the current token's tap first
        convolved = _convolve(x.to(dtype), taps, document_ids)
        return torch.nn.functional.silu(convolved).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, document_ids = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, weight.dtype)
        taps = weight[:, 0].to(dtype).t().flip(0)
        full = x.to(dtype)
        convolved = _convolve(full, taps, document_ids)
        gate = torch.sigmoid(convolved)
        grad = grads[0].to(dtype) * (gate * (1 + convolved * (1 - gate)))  # [b, s, C]
        grad_x = grad * taps[0]
        grad_taps = [(grad * full).sum((0, 1))]
        for j in range(1, taps.shape[0]):
            if j >= x.shape[1]:
                grad_taps.append(torch.zeros_like(grad_taps[0]))
                continue
            later = _history(grad[:, j:], document_ids, j)
            grad_x[:, :-j].addcmul_(later, taps[j])
            grad_taps.append((later * full[:, :-j]).sum((0, 1)))
        grad_weight = torch.stack(grad_taps[::-1], dim=1)[:, None]  # [C, 1, K]
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None

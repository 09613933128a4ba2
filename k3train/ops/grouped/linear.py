"""The grouped linear layer under autograd. Letters: n rows, i inputs, o outputs of a weight [o, i]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import products
from .segments import Segments


def grouped_linear(
    rows: Tensor, weights: Sequence[Tensor], segments: Segments, *, backend: str = "auto"
) -> Tensor:
    """rows [n, i], sorted by group, times the transpose of each group's weight: [n, o].

    Keeps the rows and the weights. The gradient of an empty group's weight is zero, as a linear layer's is
    without rows, so that every weight counts as ready for its reduction.
    """
    output: Tensor = _GroupedLinear.apply(rows, segments, backend, *weights)
    return output


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: Segments, backend: str, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.segments, ctx.backend = segments, backend
        return products.multiply(rows, weights, segments, backend=backend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, *weights = ctx.saved_tensors
        segments, backend = ctx.segments, ctx.backend
        grad = grads[0].contiguous()
        grad_rows: Tensor | None = None
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            grad_rows = products.input_gradient(grad, weights, segments, backend=backend)
        if any(ctx.needs_input_grad[3:]):
            found = products.weight_gradients(grad, rows, segments, backend=backend)
            grad_weights = [
                torch.zeros_like(weight) if one is None else one
                for one, weight in zip(found, weights, strict=True)
            ]
        return grad_rows, None, None, *grad_weights

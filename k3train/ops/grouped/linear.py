"""The grouped linear layer under autograd. Letters: n rows, i inputs, o outputs of a weight [o, i]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import products
from .segments import Segments

Seen = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""What products see of weights, the same each time; gradients pass it unchanged."""


def grouped_linear(
    rows: Tensor,
    weights: Sequence[Tensor],
    segments: Segments,
    *,
    seen: Seen | None = None,
    multiply: Callable[..., Tensor] = products.multiply,
    backend: str = "auto",
) -> Tensor:
    """rows [n, i], sorted by group, times the transpose of each group's weight: [n, o].

    `multiply`: the product of forward, of what is seen; those of backward are `products`'.
    Keeps the rows and the weights, not what is `seen` of the latter. The gradient of an empty group's weight
    is zero, as a linear layer's is without rows, so that every weight counts as ready for its reduction.
    """
    output: Tensor = _GroupedLinear.apply(rows, segments, seen or _as_they_are, multiply, backend, *weights)
    return output


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        segments: Segments,
        seen: Seen,
        multiply: Callable[..., Tensor],
        backend: str,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.segments, ctx.seen, ctx.backend = segments, seen, backend
        return multiply(rows, seen(weights), segments, backend=backend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, *weights = ctx.saved_tensors
        segments, backend = ctx.segments, ctx.backend
        grad = grads[0].contiguous()
        grad_rows: Tensor | None = None
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            grad_rows = products.input_gradient(grad, ctx.seen(weights), segments, backend=backend)
        if any(ctx.needs_input_grad[5:]):
            found = products.weight_gradients(grad, rows, segments, backend=backend)
            grad_weights = [
                torch.zeros_like(weight) if one is None else one
                for one, weight in zip(found, weights, strict=True)
            ]
        return grad_rows, None, None, None, None, *grad_weights


def _as_they_are(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return weights

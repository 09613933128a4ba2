"""One matrix product for each group: the reference.

Letters: n rows, i inputs, o outputs of a weight [o, i].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .segments import Products, Segments


def products() -> Products:
    """See `Products`; any dtype, any device."""
    return Products(multiply, input_gradient, weight_gradients)


def multiply(rows: Tensor, weights: Sequence[Tensor], segments: Segments, order: list[int]) -> Tensor:
    """rows [n, i] to [n, o]; on CPU the bits of one `linear` for each group, concatenated."""
    output = rows.new_empty(rows.shape[0], weights[0].shape[0])
    for group in order:
        torch.mm(segments.piece(rows, group), weights[group].t(), out=segments.piece(output, group))
    return output


def input_gradient(grad: Tensor, weights: Sequence[Tensor], segments: Segments, order: list[int]) -> Tensor:
    """grad [n, o] to [n, i]."""
    output = grad.new_empty(grad.shape[0], weights[0].shape[1])
    for group in order:
        torch.mm(segments.piece(grad, group), weights[group], out=segments.piece(output, group))
    return output


def weight_gradients(grad: Tensor, rows: Tensor, segments: Segments, order: list[int]) -> list[Tensor | None]:
    """grad [n, o] and rows [n, i] to [o, i] for each group, None for an empty one."""
    grads: list[Tensor | None] = [None] * len(segments.counts)
    for group in order:
        grads[group] = segments.piece(grad, group).t() @ segments.piece(rows, group)
    return grads

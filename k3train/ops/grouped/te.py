"""Transformer Engine's grouped GEMM: cuBLAS products dealt to a few streams, from lists of weights.

Empty groups are left out of the lists. Letters: n rows, i inputs, o outputs of a weight [o, i].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from .segments import Products, Segments


def products() -> Products:
    """See `Products`; BF16 and FP16 (FP32 would be multiplied as TF32)."""
    return Products(multiply, input_gradient, weight_gradients)


def multiply(rows: Tensor, weights: Sequence[Tensor], segments: Segments, order: list[int]) -> Tensor:
    """rows [n, i] to [n, o]."""
    output = rows.new_empty(rows.shape[0], weights[0].shape[0])
    _multiply(weights, rows, output, segments, order, layout="TN")
    return output


def input_gradient(grad: Tensor, weights: Sequence[Tensor], segments: Segments, order: list[int]) -> Tensor:
    """grad [n, o] to [n, i]."""
    output = grad.new_empty(grad.shape[0], weights[0].shape[1])
    _multiply(weights, grad, output, segments, order, layout="NN", grad=True)
    return output


def weight_gradients(grad: Tensor, rows: Tensor, segments: Segments, order: list[int]) -> list[Tensor | None]:
    """grad [n, o] and rows [n, i] to [o, i] for each group, None for an empty one."""
    grads: list[Tensor | None] = [None] * len(segments.counts)
    if order:
        results = [grad.new_empty(grad.shape[1], rows.shape[1]) for _ in order]
        pieces = [segments.piece(grad, g) for g in order]
        _launch([segments.piece(rows, g) for g in order], pieces, results, layout="NT", grad=True)
        for group, result in zip(order, results, strict=True):
            grads[group] = result
    return grads


def _multiply(
    weights: Sequence[Tensor], rows: Tensor, output: Tensor, segments: Segments, order: list[int], **how: Any
) -> None:
    if order:
        pieces = [segments.piece(rows, g) for g in order]
        _launch([weights[g] for g in order], pieces, [segments.piece(output, g) for g in order], **how)


def _launch(left: list[Tensor], right: list[Tensor], output: list[Tensor], **how: Any) -> None:
    """The library's first operand is what cuBLAS, which counts columns first, calls A."""
    splits = [piece.shape[0] for piece in right]
    _gemm()(left, right, output, [None] * len(left), output[0].dtype, m_splits=splits, **how)


@cache
def _gemm() -> Any:
    """Its workspaces (one for each stream) are made at the first product and kept by the library."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    return general_grouped_gemm

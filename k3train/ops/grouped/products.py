"""The three products of a grouped linear layer, each through the backend that its sizes call for.

Letters: n rows, G groups, i inputs, o outputs of a weight [o, i].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ...errors import UserError
from .. import backends
from . import cost, grouped_mm
from .segments import Products, Segments


def multiply(rows: Tensor, weights: Sequence[Tensor], segments: Segments, *, backend: str = "auto") -> Tensor:
    """x W^T for each group: rows [n, i], sorted by group, and G weights [o, i] to [n, o], in rows' dtype."""
    _check(rows, weights, segments)
    how = _pick("multiply", backend, rows, segments, weights[0].shape, weights)
    return _products(how.backend).multiply(rows, weights, segments, segments.order(how.largest_first))


def input_gradient(
    grad: Tensor, weights: Sequence[Tensor], segments: Segments, *, backend: str = "auto"
) -> Tensor:
    """g W for each group: grad [n, o] and G weights [o, i] to [n, i], in grad's dtype."""
    _check(grad, weights, segments)
    how = _pick("input_gradient", backend, grad, segments, weights[0].shape, weights)
    return _products(how.backend).input_gradient(grad, weights, segments, segments.order(how.largest_first))


def weight_gradients(
    grad: Tensor, rows: Tensor, segments: Segments, *, backend: str = "auto"
) -> list[Tensor | None]:
    """g^T x for each group: grad [n, o] and rows [n, i] to G tensors [o, i]; None for a group without rows.

    They have the dtype of the rows, accumulated in FP32 (FP64 for FP64), and may be views of one tensor.
    """
    assert grad.shape[0] == rows.shape[0] == segments.borders[-1], (grad.shape, rows.shape)
    how = _pick("weight_gradients", backend, rows, segments, (grad.shape[1], rows.shape[1]))
    return _products(how.backend).weight_gradients(grad, rows, segments, segments.order(how.largest_first))


def padding(
    rows: int,
    groups: int,
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
) -> int:
    """To what multiple to round each group's rows so that all products together take least; 1 on a CPU.

    Args:
        rows: of all groups together.
        shapes: (inputs, outputs) of the weights that they go through.
    """
    if device.type != "cuda":
        return 1
    names = set.intersection(*(set(_usable(backend, "cuda", dtype, *shape)) for shape in shapes))
    return cost.padding(_model(device.index or 0), rows, groups, shapes, tuple(sorted(names)))


def _check(rows: Tensor, weights: Sequence[Tensor], segments: Segments) -> None:
    assert len(weights) == len(segments.counts), (len(weights), len(segments.counts))
    assert rows.shape[0] == segments.borders[-1], (rows.shape, segments.borders[-1])


def _pick(
    product: str,
    requested: str,
    rows: Tensor,
    segments: Segments,
    shape: Sequence[int],
    weights: Sequence[Tensor] = (),
) -> cost.Choice:
    outputs, inputs = shape
    names = _usable(requested, rows.device.type, rows.dtype, inputs, outputs)
    if len(names) == 1:
        return cost.Choice(names[0])
    model, load = _model(rows.device.index or 0), segments.load
    best = cost.choose(model, product, load, inputs, outputs, 0, names)
    if best.backend != "grouped_mm" or not weights:
        return best
    # Where the weights lie is looked up only if it can change the choice.
    worst = cost.choose(model, product, load, inputs, outputs, len(weights), names)
    if worst == best:
        return best
    copies = grouped_mm.copied(weights, segments)
    return cost.choose(model, product, load, inputs, outputs, copies, names)


@cache
def _usable(
    requested: str, device_type: str, dtype: torch.dtype, inputs: int, outputs: int
) -> tuple[str, ...]:
    """The backends to choose from: one if it was asked for, or if nothing is known about the device."""
    refusal = grouped_mm.refuses(inputs, outputs)
    if requested != "auto":
        name = backends.resolve("grouped", requested, device_type, dtype).name
        if name == "grouped_mm" and refusal:
            raise UserError(f"model.backends.grouped={requested}: {refusal}; use auto, te or loop")
        return (name,)
    if device_type != "cuda":
        # One linear for each expert, and its bits, whatever the load.
        return ("loop",)
    names = [backend.name for backend in backends.usable("grouped", device_type, dtype)]
    return tuple(name for name in names if name != "grouped_mm" or refusal is None)


@cache
def _products(name: str) -> Products:
    backend = next(b for b in backends.candidates("grouped") if b.name == name)
    products: Products = backend.load()()
    return products


@cache
def _model(device: int) -> cost.Model:
    return cost.model_for(torch.cuda.get_device_name(device))

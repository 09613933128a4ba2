"""PyTorch's grouped matrix product: one kernel over all groups, with the segment ends read on the device.

It wants the weights of its groups at equal distances in memory, so a list of weights is cut into runs that
lie so, each one launch; weights outside such runs are copied into a stack. Weights in falling order of
address have no strided view in PyTorch and are copied too. Letters: n rows, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .segments import Products, Segments

ALIGNMENT = 16
"""Bytes that every stride and address is a multiple of."""

# The public name came with torch 2.10.
_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)


class Run(NamedTuple):
    """Neighbouring weights first .. last - 1, `step` elements apart; 0 where they are copied."""

    first: int
    last: int
    step: int


def products() -> Products:
    """See `Products`; BF16."""
    return Products(multiply, input_gradient, weight_gradients)


def refuses(inputs: int, outputs: int) -> str | None:
    """Why weights [outputs, inputs] cannot be taken, or None."""
    if inputs * 2 % ALIGNMENT or outputs * 2 % ALIGNMENT:
        return f"needs widths that are multiples of {ALIGNMENT // 2}, not {inputs} and {outputs}"
    return None


def multiply(rows: Tensor, weights: Sequence[Tensor], segments: Segments, order: list[int]) -> Tensor:
    """rows [n, i] to [n, o]."""
    return _by_runs(rows, weights, segments, weights[0].shape[0], transposed=True)


def input_gradient(grad: Tensor, weights: Sequence[Tensor], segments: Segments, order: list[int]) -> Tensor:
    """grad [n, o] to [n, i]."""
    return _by_runs(grad, weights, segments, weights[0].shape[1], transposed=False)


def weight_gradients(grad: Tensor, rows: Tensor, segments: Segments, order: list[int]) -> list[Tensor | None]:
    """grad [n, o] and rows [n, i] to [o, i] for each group: views of one tensor; None for an empty group."""
    grads: list[Tensor | None] = [None] * len(segments.counts)
    if segments.filled:
        first, last = segments.filled[0], segments.filled[-1] + 1
        stack = _grouped_mm(grad.t(), rows, offs=segments.offsets(first, last))  # [last - first, o, i]
        for group in segments.filled:
            grads[group] = stack[group - first]
    return grads


def runs(weights: Sequence[Tensor]) -> list[Run]:
    """Cut `weights` into runs at equal rising distances in one storage, and runs to copy between them."""
    if not all(map(Tensor.is_contiguous, weights)):
        return [Run(0, len(weights), 0)]
    size, width = weights[0].nbytes, weights[0].element_size()
    addresses = tuple(map(Tensor.data_ptr, weights))
    found = _equal_steps(addresses, (), size)
    if not all(_one_storage(weights, run) for run in found if run.step):
        # Neighbours in memory, yet not of one storage: a view may not reach from one to the next.
        storages = tuple(weight.untyped_storage().data_ptr() for weight in weights)
        found = _equal_steps(addresses, storages, size)
    return [run._replace(step=run.step // width) for run in found]


def copied(weights: Sequence[Tensor], segments: Segments) -> int:
    """How many of the weights a product has to copy first."""
    if not segments.filled:
        return 0
    used = weights[segments.filled[0] : segments.filled[-1] + 1]
    return sum(run.last - run.first for run in runs(used) if not run.step)


def _one_storage(weights: Sequence[Tensor], run: Run) -> bool:
    """Whether the run's ends lie in one storage, and so all between them."""
    ends = (weights[run.first], weights[run.last - 1])
    first, last = (weight.untyped_storage().data_ptr() for weight in ends)
    return first == last


@lru_cache(maxsize=1024)
def _equal_steps(addresses: tuple[int, ...], storages: tuple[int, ...], size: int) -> list[Run]:
    """Runs of tensors of `size` bytes by their addresses, and storages where given; `step` in bytes."""
    steps = [after - before for before, after in pairwise(addresses)]
    for border, (before, after) in enumerate(pairwise(storages)):
        if before != after:
            steps[border] = 0
    found: list[Run] = []
    first = 0
    while first < len(addresses):
        last = first + 1
        while last < len(addresses) and steps[last - 1] == steps[first]:
            last += 1
        step = steps[first] if last - first > 1 else 0
        if step < size or (step | addresses[first]) % ALIGNMENT:
            # A run of one to copy: the next weight may begin a run of its own.
            step, last = 0, first + 1
        if not step and found and not found[-1].step:
            first = found.pop().first
        found.append(Run(first, last, step))
        first = last
    return found


def _stack(weights: Sequence[Tensor], run: Run) -> Tensor:
    """The run's weights as [last - first, o, i]."""
    if run.step:
        o, i = weights[run.first].shape
        return weights[run.first].as_strided((run.last - run.first, o, i), (run.step, i, 1))
    return torch.stack([weights[group] for group in range(run.first, run.last)])


def _by_runs(
    rows: Tensor, weights: Sequence[Tensor], segments: Segments, width: int, *, transposed: bool
) -> Tensor:
    if not segments.filled:
        return rows.new_empty(rows.shape[0], width)
    base, end = segments.filled[0], segments.filled[-1] + 1
    output: Tensor | None = None
    for run in runs(weights[base:end]):
        first, last = base + run.first, base + run.last
        begin, stop = segments.borders[first], segments.borders[last]
        if begin == stop:
            continue
        stack = _stack(weights, Run(first, last, run.step))
        stack = stack.transpose(1, 2) if transposed else stack
        # The first run gets all rows: those behind its own end stay undefined until a later run fills them.
        mine = rows if output is None else rows[begin:stop]
        result = _grouped_mm(mine, stack, offs=segments.offsets(first, last))
        if output is None:
            output = result
        else:
            output[begin:stop] = result
    assert output is not None
    return output

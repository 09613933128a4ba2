"""Prints the relative errors of KDA's Triton kernels, interpreted on the CPU, against the recurrence in FP64.

Usage: kda_interpreter_worker.py LENGTHS:SHIFT:H:D ..., with documents' lengths, as 70,1, what is added to the
decay logits, heads and head width. One line for each case.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import torch
from torch import Tensor

from k3train.ops.kda.core import kda_gate, l2norm
from k3train.ops.kda.reference import recurrent_kda
from k3train.ops.kda.triton.attention import attend
from k3train.ops.kda.triton.chunks import make_table

NAMES = ("q", "k", "v", "z", "beta", "A_log", "dt_bias", "initial")


def exact(inputs: list[Tensor], borders: list[int]) -> tuple[Tensor, Tensor]:
    """Outputs and last states, document by document."""
    q, k, v, z, beta, A_log, dt_bias, initial = inputs
    g = kda_gate(z[None], A_log, dt_bias, -5.0)[0]
    outputs, states = [], []
    for n, (start, stop) in enumerate(pairwise(borders)):
        rows = (x[None, start:stop] for x in (l2norm(q), l2norm(k), v, g, beta))
        output, state = recurrent_kda(*rows, scale=q.shape[-1] ** -0.5, initial_state=initial[n : n + 1])
        outputs.append(output[0])
        states.append(state)
    return torch.cat(outputs), torch.cat(states)


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def case(lengths: list[int], shift: float, H: int, D: int) -> dict[str, float]:
    """The relative error of each result."""
    torch.manual_seed(0)
    T, n = sum(lengths), len(lengths)
    borders = torch.tensor([0, *lengths]).cumsum(0)
    vectors = [torch.randn(T, H, D).bfloat16() for _ in range(4)]
    constants = [torch.sigmoid(torch.randn(T, H)), 0.3 * torch.randn(H), torch.randn(H * D) + shift]
    inputs = [*vectors, *constants, torch.randn(n, H, D, D)]
    weights = [torch.randn(T, H, D).bfloat16(), torch.randn(n, H, D, D)]
    found = [x.clone().requires_grad_() for x in inputs]
    output, state = attend(
        *found[:7], lower_bound=-5.0, chunks=make_table(borders, T), initial_state=found[7], want_state=True
    )
    assert state is not None
    grads = torch.autograd.grad([output, state], found, weights)
    true = [x.double().requires_grad_() for x in inputs]
    expected = exact(true, borders.tolist())
    expected_grads = torch.autograd.grad(expected, true, [x.double() for x in weights])
    errors = dict(zip(NAMES, map(relative, grads, expected_grads), strict=True))
    with torch.no_grad():
        errors |= {"output": relative(output, expected[0]), "state": relative(state, expected[1])}
    return errors


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        documents, added, heads, width = argument.split(":")
        lengths = [int(x) for x in documents.split(",")]
        print(json.dumps(case(lengths, float(added), int(heads), int(width))))

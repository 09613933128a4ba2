"""The algorithm of the Triton kernels of KDA in FP64, and the kernels themselves in Triton's interpreter.

Letters: N chunks, H heads, C tokens of a chunk, D, Dv head dims, n documents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3train.errors import UserError
from k3train.ops import backends
from k3train.ops.kda.reference import recurrent_kda
from k3train.ops.kda.triton import reference
from k3train.ops.kda.triton.chunks import make_table

WORKER = Path(__file__).parent / "kda_interpreter_worker.py"
ROOT = Path(__file__).parents[3]


def to_chunks(x: Tensor, N: int) -> Tensor:
    """[1, N*C, H, *] -> [N, H, C, *]."""
    return x[0].unflatten(0, (N, reference.C)).transpose(1, 2)


def to_tokens(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)[None]


@pytest.mark.parametrize("decay", ["drawn", "none", "full", "both"])
def test_the_algorithm_is_the_recurrence_in_both_directions(decay: str) -> None:
    N, H, D, Dv = 3, 2, 16, 24
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(1, N * 64, H, D), dim=-1) for _ in range(2))
    v, logits, beta = normal(1, N * 64, H, Dv), normal(1, N * 64, H, D), torch.sigmoid(normal(1, N * 64, H))
    g = (
        -5
        * {
            "drawn": torch.sigmoid(logits),
            "none": torch.zeros_like(logits),
            "full": torch.ones_like(logits),
            "both": (logits > 0).double(),
        }[decay]
    )
    state, grad_output, grad_state = normal(1, H, D, Dv), normal(1, N * 64, H, Dv), normal(1, H, D, Dv)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
    expected = recurrent_kda(*inputs[:5], scale=D**-0.5, initial_state=state)
    expected_grads = torch.autograd.grad(expected, inputs, [grad_output, grad_state])

    with torch.no_grad():
        tokens = [to_chunks(x, N) for x in (q * D**-0.5, k, v, g, beta)]
        chunks = reference.prepare(*tokens)
        output, errors, states, last = reference.walk(chunks, state[0])
        grad = to_chunks(grad_output, N)
        grad_errors, behind, grad_first = reference.walk_back(chunks, grad, grad_state[0])
        q_c, k_c, _, g_c, beta_c = tokens
        grads = reference.gradients(
            q_c, k_c, g_c, beta_c, chunks.inverse, grad, errors, grad_errors, states, behind
        )
        by_q, *rest, by_beta = grads
        found = [to_tokens(by_q) * D**-0.5, *map(to_tokens, rest), to_tokens(by_beta[..., None])[..., 0]]
    torch.testing.assert_close((to_tokens(output), last[None]), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((*found, grad_first[None]), expected_grads, rtol=1e-10, atol=1e-12)


def test_the_inverse_holds_for_equal_keys_that_nothing_decays() -> None:
    lower = torch.ones(64, 64, dtype=torch.float64).tril(-1)
    identity = torch.eye(64, dtype=torch.float64)
    expected = identity - identity.roll(1, 0).tril(-1)
    torch.testing.assert_close(reference.unit_lower_inverse(lower), expected)


def test_documents_share_no_chunk() -> None:
    lengths = torch.tensor([70, 1, 64, 129])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int()
    table = make_table(cu_seqlens, int(lengths.sum()))
    rows = table.table[table.table[:, 1] > 0].tolist()
    assert rows == [
        [0, 64, 0, 1], [64, 6, 0, 0], [70, 1, 1, 1], [71, 64, 2, 1],
        [135, 64, 3, 1], [199, 64, 3, 0], [263, 1, 3, 0],
    ]  # fmt: skip
    assert table.offsets.tolist() == [0, 2, 3, 4, 7]
    assert table.room >= 7
    even = make_table(torch.tensor([0, 128, 256]), 256, 128)
    assert even.table[:, 1].tolist() == [64] * 4


def test_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    # The state kept in front of the ninth chunk; the gate at either bound; documents of one token; the keys'
    # gradients by two programs.
    cases = ["514,1:-2:1:64", "65,63:12:1:64", "1,130:-30:1:64", "70,1:-2:2:128"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(WORKER), *cases],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    # Operands are FP32 there; what is left is the rounding of BF16 results.
    for errors in found:
        assert set(errors) == {"output", "state", "q", "k", "v", "z", "beta", "A_log", "dt_bias", "initial"}
        assert errors.pop("z") < 1e-2  # where the gate is full, a few elements make up the norm
        assert all(error < 4e-3 for error in errors.values()), errors


def test_it_is_not_chosen_unasked_and_refuses_the_cpu() -> None:
    assert [backend.name for backend in backends.candidates("kda")][-1] == "triton"
    with pytest.raises(UserError, match=r"kda=triton: runs on cuda tensors, not cpu"):
        backends.resolve("kda", "triton", "cpu")

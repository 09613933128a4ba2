"""Our Triton kernels of KDA against the chunk form in FP64, and beside flash-linear-attention's.

Letters: b batch, s sequence, T tokens, H heads, D head dim, n documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from k3train.ops import backends
from k3train.ops.kda import delta_attention
from k3train.ops.kda.core import kda_gate, l2norm
from k3train.ops.kda.reference import recurrent_kda
from k3train.ops.packing import Packing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("output", "q", "k", "v", "z", "beta", "A_log", "dt_bias")
EOD = -1
H, D = 2, 128


@pytest.fixture(autouse=True)
def _usable() -> None:
    reasons = {(row[0], row[1]): row[3] for row in backends.report()}
    if reason := reasons["kda", "triton"]:
        pytest.skip(reason)


def packing(b: int, s: int, ends: Sequence[int]) -> Packing:
    tokens = torch.zeros(b, s, dtype=torch.long)
    tokens[0, list(ends)] = EOD
    return Packing.from_tokens(tokens.cuda(), EOD)


def drawn(
    b: int, s: int, *, shift: float = -2.0, size: float = 1.0, seed: int = 0, width: int = D
) -> list[Tensor]:
    """q, k, v, z, beta, A_log, dt_bias; `size` is the standard deviation of q, k and v."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    vectors = [(size * normal(b, s, H, width)).bfloat16() for _ in range(3)]
    constants = [torch.sigmoid(normal(b, s, H)), 0.3 * normal(H), normal(H * width) + shift]
    return [*vectors, normal(b, s, H, width).bfloat16(), *constants]


def results(inputs: Sequence[Tensor], where: Packing, backend: str) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = delta_attention(*leaves, lower_bound=-5.0, packing=where, backend=backend)
    generator = torch.Generator("cuda").manual_seed(9)
    weight = torch.randn(output.shape, device="cuda", generator=generator).bfloat16()
    return [output.detach(), *torch.autograd.grad(output, leaves, weight.to(output))]


def errors(inputs: Sequence[Tensor], where: Packing, backend: str) -> dict[str, float]:
    """By relative norm, against the chunk form in FP64."""
    found = results(inputs, where, backend)
    expected = results([x.double() for x in inputs], where, "chunk")
    assert all(torch.isfinite(x).all() for x in found)
    pairs = zip(NAMES, found, expected, strict=True)
    return {name: ((a.double() - e).norm() / e.norm()).item() for name, a, e in pairs}


def check(found: dict[str, float]) -> None:
    """Within 5e-3; the decay's and A_log's gradients, sums that cancel, within 2e-2 and 5e-2."""
    bounds = {"z": 2e-2, "dt_bias": 2e-2, "A_log": 5e-2}
    assert all(error <= bounds.get(name, 5e-3) for name, error in found.items()), found


@pytest.mark.parametrize("ends", [(), (5, 63, 64, 65, 200)], ids=["whole", "packed"])
@pytest.mark.parametrize(("b", "s"), [(1, 64), (2, 300), (1, 1025)])
def test_against_fp64(b: int, s: int, ends: tuple[int, ...]) -> None:
    check(errors(drawn(b, s), packing(b, s, [e for e in ends if e < s - 1]), "triton"))


def test_heads_64_wide() -> None:
    check(errors(drawn(1, 300, width=64), packing(1, 300, (5, 63, 64, 200)), "triton"))


@pytest.mark.parametrize("shift", [12.0, -30.0], ids=["decay -5 everywhere", "decay 0 everywhere"])
def test_extreme_gates(shift: float) -> None:
    found = errors(drawn(1, 300, shift=shift), packing(1, 300, (100,)), "triton")
    check({name: error for name, error in found.items() if name != "A_log"})


def test_documents_of_one_token() -> None:
    found = errors(drawn(1, 130), packing(1, 130, (0, 1, 2, 63, 64, 65, 128)), "triton")
    check(found)


@pytest.mark.parametrize("size", [1e-3, 3e3])
def test_small_and_large_norms(size: float) -> None:
    found = errors(drawn(1, 200, size=size), packing(1, 200, ()), "triton")
    check({name: error for name, error in found.items() if name != "A_log"})


def test_no_worse_than_fla() -> None:
    if reason := {(row[0], row[1]): row[3] for row in backends.report()}["kda", "fla"]:
        pytest.skip(reason)
    inputs, where = drawn(1, 2048), packing(1, 2048, (700,))
    ours, theirs = (errors(inputs, where, name) for name in ("triton", "fla"))
    # A_log's is one small sum a head: chance decides.
    assert all(ours[name] <= 1.1 * theirs[name] for name in NAMES if name != "A_log"), (ours, theirs)


def test_a_second_run_is_equal_to_the_last_bit() -> None:
    inputs, where = drawn(2, 700), packing(2, 700, (64, 65, 300))
    first, second = (results(inputs, where, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, where = drawn(2, 300), packing(2, 300, (5, 63, 64, 65, 200))
    expected = results(inputs, where, "triton")
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    found = results(inputs, where, "triton")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_states_of_documents_go_in_and_out() -> None:
    from k3train.ops.kda.triton.attention import attend
    from k3train.ops.kda.triton.chunks import make_table

    borders = [0, 70, 71, 700]
    flat = [x[0] if x.dim() > 2 else x for x in drawn(1, 700)]
    states = torch.randn(3, H, D, D, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    leaves = [x.clone().requires_grad_() for x in (*flat, states)]
    table = make_table(torch.tensor(borders, device="cuda"), 700)
    output, last = attend(
        *leaves[:7], lower_bound=-5.0, chunks=table, initial_state=leaves[7], want_state=True
    )
    exact = [x.double().requires_grad_() for x in (*flat, states)]
    g = kda_gate(exact[3][None], exact[5], exact[6], -5.0)[0]
    tokens = (l2norm(exact[0]), l2norm(exact[1]), exact[2], g, exact[4])
    parts = [
        recurrent_kda(
            *(x[None, start:stop] for x in tokens), scale=D**-0.5, initial_state=exact[7][n : n + 1]
        )
        for n, (start, stop) in enumerate(pairwise(borders))
    ]
    expected = torch.cat([part[0][0] for part in parts]), torch.cat([part[1] for part in parts])
    weights = [torch.randn_like(output), torch.randn_like(states)]
    grads = torch.autograd.grad([output, last], leaves, weights)
    expected_grads = torch.autograd.grad(expected, exact, [x.double() for x in weights])
    pairs = zip((output, last, *grads), (*expected, *expected_grads), strict=True)
    found = [((a.double() - e).norm() / e.norm()).item() for a, e in pairs]
    names = ("output", "state", *NAMES[1:], "initial")
    check(dict(zip(names, found, strict=True)))

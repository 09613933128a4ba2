"""The loss in chunks on a GPU: its precision, its bits, its memory, and that it waits for nothing.

Letters: t tokens, d hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3train.ops import backends
from k3train.ops.cross_entropy import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Case = tuple[Tensor, Tensor, Tensor, Tensor]
Losses = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@pytest.fixture(params=["chunked", "triton"])
def losses(request: pytest.FixtureRequest) -> Losses:
    """A backend that walks over words."""
    reasons = {(row[0], row[1]): row[3] for row in backends.report()}
    if reason := reasons["cross_entropy", request.param]:
        pytest.skip(reason)
    return backends.resolve("cross_entropy", request.param, "cuda", torch.bfloat16).load()


def case(t: int, d: int, v: int, scale: float = 1.0) -> Case:
    """BF16 features and weight, labels, gradients of the losses, a third of them 0."""
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = scale * torch.randn(t, d, device="cuda", generator=generator)
    weight = torch.randn(v, d, device="cuda", generator=generator) * d**-0.5
    labels = torch.randint(v, (t,), device="cuda", generator=generator)
    labels[:2] = torch.tensor([0, v - 1])
    grad = (torch.rand(t, device="cuda", generator=generator) < 0.66).float()
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), labels, grad


def run(losses: Losses, words: int, inputs: Case) -> list[Tensor]:
    """Losses, and gradients of features and weight."""
    hidden, weight, labels, grad = inputs
    found = losses(hidden, weight, labels, words)
    return [found.detach(), *torch.autograd.grad(found, (hidden, weight), grad.to(found.dtype))]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("scale", [1.0, 3e3])
@pytest.mark.parametrize(("t", "d", "v", "words"), [(513, 384, 4099, 1000), (1024, 1024, 8192, 2048)])
def test_no_further_from_fp64_than_the_reference(
    losses: Losses, t: int, d: int, v: int, words: int, scale: float
) -> None:
    inputs = case(t, d, v, scale)
    doubled = tuple(x.detach().double().requires_grad_() for x in inputs[:2])
    exact = run(reference.token_losses, 0, (*doubled, *inputs[2:]))
    ours, theirs = run(losses, words, inputs), run(reference.token_losses, 0, inputs)
    for own, other, expected in zip(ours, theirs, exact, strict=True):
        assert torch.isfinite(own).all()
        assert relative(own, expected) <= 1.01 * relative(other, expected)
    assert relative(ours[0], exact[0]) < 1e-5


def test_bits_are_the_same_again(losses: Losses) -> None:
    inputs = case(1024, 512, 8192)
    first, second = (run(losses, 1024, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_memory_is_that_of_a_chunk_and_of_what_goes_out(losses: Losses) -> None:
    t, d, v, words = 8192, 1024, 65536, 4096
    inputs = case(t, d, v)
    run(losses, words, inputs)  # libraries' workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(losses, words, inputs)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    # FP32 and BF16 of a chunk, FP32 twice and BF16 of features, the weight's gradient, a token's numbers.
    planned = t * words * 6 + t * d * (2 * 4 + 2) + v * d * 2 + 64 * t
    assert 0.6 * planned < peak < 1.05 * planned
    assert peak < t * v * 4 / 4, "far from all logits"


def test_the_host_never_waits(losses: Losses) -> None:
    inputs = case(512, 256, 4096)
    run(losses, 1024, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(losses, 1024, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")

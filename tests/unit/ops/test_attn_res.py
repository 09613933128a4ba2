"""Letters: L sources, d hidden."""

import pytest
import torch
from torch import Tensor

from k3train.ops.attn_res import attn_res, two_phase

BACKENDS = ("lean", "reference")


def make_inputs(
    L: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return [normal(*shape) for _ in range(L)], normal(shape[-1]), normal(shape[-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_formula_of_one_token(backend: str) -> None:
    sources, query, weight = make_inputs(3, (2, 5))
    values = torch.stack([s[1] for s in sources]).detach()
    query, weight = query.detach(), weight.detach()
    logits = torch.stack([(query * weight) @ (v / (v.square().mean() + 1e-5).sqrt()) for v in values])
    expected = logits.softmax(0) @ values
    torch.testing.assert_close(attn_res(sources, query, weight, backend=backend)[1], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_query_gives_the_mean_of_the_sources(backend: str) -> None:
    sources, query, weight = make_inputs(5, (3, 8))
    mixed = attn_res(sources, torch.zeros_like(query), weight, backend=backend)
    torch.testing.assert_close(mixed, torch.stack(sources).mean(0), rtol=0, atol=1e-15)


def test_one_source_passes_through() -> None:
    (source,), query, weight = make_inputs(1, (3, 8))
    assert torch.equal(attn_res([source], query, weight), source)


def test_lean_gradients_by_finite_differences() -> None:
    sources, query, weight = make_inputs(3, (2, 2, 4))
    check = lambda q, w, *s: attn_res(s, q, w, backend="lean")  # noqa: E731
    assert torch.autograd.gradcheck(check, (query, weight, *sources))


def test_lean_equals_reference_with_gradients() -> None:
    sources, query, weight = make_inputs(9, (4, 3, 16))
    leaves = [*sources, query, weight]
    outputs = [attn_res(sources, query, weight, backend=backend) for backend in BACKENDS]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*[torch.autograd.grad(o.sin().sum(), leaves) for o in outputs])


def test_lean_saves_the_sources_themselves() -> None:
    sources, query, weight = make_inputs(4, (6, 16))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attn_res(sources, query, weight, backend="lean")
    owned = {t.data_ptr() for t in (*sources, query, weight)}
    extra = sum(t.numel() for t in saved if t.data_ptr() not in owned)
    assert extra == 2 * 4 * 6  # logit and inverse rms of each source and token


def test_two_phases_equal_one_pass() -> None:
    sources, _, _ = make_inputs(6, (2, 3, 8))
    bank, running = sources[:4], sources[4:]
    _, queries, weights = make_inputs(0, (2, 8))
    queries, weights = torch.stack((queries, -3 * queries)), torch.stack((weights, 2 * weights))
    mixed = two_phase(bank, running, queries, weights)
    for i in range(2):
        expected = attn_res([*bank, running[i]], queries[i], weights[i], backend="reference")
        torch.testing.assert_close(mixed[i], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    sources, query, weight = make_inputs(9, (257, 192), dtype)
    whole = attn_res(sources, query, weight)
    for start, end in ((0, 1), (3, 4), (100, 257)):
        part = attn_res([s[start:end] for s in sources], query, weight)
        assert torch.equal(whole[start:end], part)
    assert whole.dtype == dtype


def test_gradients_repeat_bit_for_bit() -> None:
    sources, query, weight = make_inputs(5, (64, 32), torch.float32)
    leaves = [*sources, query, weight]
    runs = [torch.autograd.grad(attn_res(sources, query, weight).square().sum(), leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

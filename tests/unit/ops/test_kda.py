"""Letters: b batch, s sequence, H heads, D key head dim, Dv value head dim."""

import math

import pytest
import torch
from torch import Tensor

from k3train.ops.kda import delta_attention, kda_gate, l2norm
from k3train.ops.kda.chunk import chunk_kda
from k3train.ops.kda.reference import gate, recurrent_kda, recurrent_kda_backward, segment_map
from k3train.ops.packing import Packing

SCALE = 0.35


def make_inputs(
    b: int, s: int, H: int, D: int, Dv: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v, g, beta with unit keys and log-decays spread over (-5, 0)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(b, s, H, D), dim=-1) for _ in range(2))
    g = -5 * torch.sigmoid(2 * normal(b, s, H, D))
    inputs = (q, k, normal(b, s, H, Dv), g, torch.sigmoid(normal(b, s, H)))
    return [x.to(dtype).requires_grad_() for x in inputs]


def normal_like(*tensors: Tensor, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in tensors]


def random_documents(b: int, s: int, seed: int) -> Tensor:
    borders = torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 0.15
    return borders.int().cumsum(1)


def test_one_token_by_hand() -> None:
    q, k, v, g, beta = make_inputs(1, 1, 1, 3, 2)
    state = torch.arange(6.0, dtype=torch.float64).view(1, 1, 3, 2)
    output, after = recurrent_kda(q, k, v, g, beta, scale=SCALE, initial_state=state)
    eye, key = torch.eye(3, dtype=torch.float64), k[0, 0, 0]
    erase = eye - beta[0, 0, 0] * torch.outer(key, key)
    expected = erase @ torch.diag(g[0, 0, 0].exp()) @ state[0, 0] + beta[0, 0, 0] * torch.outer(
        key, v[0, 0, 0]
    )
    torch.testing.assert_close(after[0, 0], expected)
    torch.testing.assert_close(output[0, 0, 0], SCALE * expected.T @ q[0, 0, 0])


def test_hand_written_backward_matches_autograd() -> None:
    inputs = make_inputs(2, 9, 2, 4, 3)
    output, _ = recurrent_kda(*inputs, scale=SCALE)
    (grad,) = normal_like(output)
    expected = torch.autograd.grad(output, inputs, grad)
    actual = recurrent_kda_backward(*(x.detach() for x in inputs), grad, scale=SCALE)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)


def test_recurrent_gradients_by_finite_differences() -> None:
    inputs = make_inputs(1, 4, 1, 3, 2)
    assert torch.autograd.gradcheck(lambda *x: recurrent_kda(*x, scale=SCALE)[0], inputs)


def test_chunk_gradients_by_finite_differences() -> None:
    inputs = make_inputs(1, 7, 1, 3, 2)
    state = torch.ones(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 2]])

    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        return chunk_kda(*x[:5], scale=SCALE, initial_state=x[5], document_ids=ids, chunk_size=4)

    assert torch.autograd.gradcheck(run, (*inputs, state))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("s", "chunk_size"), [(1, 16), (16, 16), (37, 16), (50, 32), (23, 4)])
def test_chunk_equals_recurrence(s: int, chunk_size: int, packed: bool) -> None:
    inputs = make_inputs(3, s, 2, 8, 6, seed=s)
    (state,) = normal_like(torch.empty(3, 2, 8, 6, dtype=torch.float64))
    state.requires_grad_()
    ids = random_documents(3, s, seed=s) if packed else None
    keywords = {"scale": SCALE, "initial_state": state, "document_ids": ids}
    expected = recurrent_kda(*inputs, **keywords)
    actual = chunk_kda(*inputs, **keywords, chunk_size=chunk_size)
    leaves = [*inputs, state]
    weights = normal_like(*expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-13)
    grads = [torch.autograd.grad(pair, leaves, weights) for pair in (actual, expected)]
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [-5.0, 0.0])
def test_chunk_in_fp32_at_the_extremes_of_the_gate(decay: float) -> None:
    inputs = make_inputs(1, 48, 2, 16, 16)
    inputs[3] = torch.full_like(inputs[3], decay, requires_grad=True)
    exact, _ = recurrent_kda(*inputs, scale=SCALE)
    expected = torch.autograd.grad(exact.square().sum(), inputs)
    single = [x.detach().float().requires_grad_() for x in inputs]
    for chunk_size in (16, 32):
        output, _ = chunk_kda(*single, scale=SCALE, chunk_size=chunk_size)
        grads = torch.autograd.grad(output.square().sum(), single)
        scales = [e.norm() for e in (exact, *expected)]
        scales[4] = scales[2]  # g's gradient is a difference of terms as large as k's
        for a, e, size in zip((output, *grads), (exact, *expected), scales, strict=True):
            assert (a - e).norm() <= 2e-6 * size


def test_equal_keys_without_decay_stay_accurate_in_fp32() -> None:
    q, k, v, g, beta = make_inputs(1, 64, 1, 8, 8)
    k = k[:, :1].expand_as(k)
    g, beta = torch.zeros_like(g), torch.ones_like(beta)
    exact, _ = recurrent_kda(q, k, v, g, beta, scale=SCALE)
    output, _ = chunk_kda(*(x.float() for x in (q, k, v, g, beta)), scale=SCALE)
    assert (output - exact).norm() <= 1e-5 * exact.norm()


def test_a_packed_document_equals_the_document_alone() -> None:
    inputs = make_inputs(1, 40, 2, 8, 8)
    ids = torch.tensor([[0] * 11 + [1] * 22 + [2] * 7])
    packed, state = chunk_kda(*inputs, scale=SCALE, document_ids=ids)
    for start, end in ((0, 11), (11, 33), (33, 40)):
        alone, last = chunk_kda(*(x[:, start:end] for x in inputs), scale=SCALE)
        torch.testing.assert_close(packed[:, start:end], alone, rtol=0, atol=1e-14)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-14)


def test_segments_replay_through_their_maps() -> None:
    inputs = make_inputs(2, 30, 2, 6, 5)
    whole, final = recurrent_kda(*inputs, scale=SCALE)
    state, outputs = torch.zeros_like(final), []
    for start, end in ((0, 7), (7, 8), (8, 30)):
        segment = [x[:, start:end] for x in inputs]
        outputs.append(recurrent_kda(*segment, scale=SCALE, initial_state=state)[0])
        transition, made = segment_map(*segment[1:])
        state = transition @ state + made
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-13)


def test_initial_log_decay_follows_the_time_step() -> None:
    step = torch.logspace(-3, -1, 16, dtype=torch.float64)
    dt_bias = step + torch.log(-torch.expm1(-step))  # inverse softplus
    g = kda_gate(torch.zeros(1, 1, 2, 8, dtype=torch.float64), torch.zeros(2), dt_bias, -5.0)
    torch.testing.assert_close(g.flatten(), -5 * (1 - torch.exp(-step)), rtol=1e-12, atol=0)
    assert math.isclose(g.min().item(), -0.4758, abs_tol=1e-4)
    assert math.isclose(g.max().item(), -0.0050, abs_tol=1e-4)


def test_gate_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 2, 4), (2,), (8,))
    leaves = [torch.randn(x, generator=generator, dtype=torch.float64, requires_grad=True) for x in shapes]
    assert torch.autograd.gradcheck(lambda *x: kda_gate(*x, -5.0), leaves)
    torch.testing.assert_close(kda_gate(*leaves, -5.0), gate(*leaves, -5.0))


def test_l2norm_adds_its_epsilon_under_the_root() -> None:
    x = torch.tensor([[3e-3, 4e-3]], dtype=torch.float64)
    torch.testing.assert_close(l2norm(x), x / math.sqrt(25e-6 + 1e-6))
    assert l2norm(x.bfloat16()).dtype == torch.bfloat16


def test_delta_attention_scales_by_the_head_dim_and_normalises() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(2, 20, 2, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    beta, A_log, dt_bias = torch.rand(2, 20, 2, generator=generator), torch.zeros(2), torch.zeros(32)
    packing = Packing.from_tokens(torch.arange(40).view(2, 20), 6)
    g = -5 * torch.sigmoid(z)
    unit_q, unit_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    expected, _ = recurrent_kda(unit_q, unit_k, v, g, beta, scale=0.25, document_ids=packing.document_ids)
    for backend in ("auto", "recurrent", "chunk"):
        actual = delta_attention(
            q, k, v, z, beta, A_log, dt_bias, lower_bound=-5.0, packing=packing, backend=backend
        )
        torch.testing.assert_close(actual, expected)


def test_delta_attention_in_bf16_returns_the_dtype_of_v() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(1, 9, 1, 8, generator=generator).bfloat16().requires_grad_() for _ in range(4))
    output = delta_attention(
        q, k, v, z, torch.rand(1, 9, 1), torch.zeros(1), torch.zeros(8),
        lower_bound=-5.0, packing=Packing.single(1, 9, "cpu"),
    )  # fmt: skip
    output.float().sum().backward()
    assert output.dtype == q.grad.dtype == z.grad.dtype == torch.bfloat16


def test_rows_do_not_change_with_the_size_of_the_batch() -> None:
    inputs = make_inputs(3, 40, 2, 16, 16, dtype=torch.float32)
    batch, _ = chunk_kda(*inputs, scale=SCALE)
    row, _ = chunk_kda(*(x[1:2] for x in inputs), scale=SCALE)
    assert torch.equal(batch[1:2], row)

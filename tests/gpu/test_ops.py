"""Kernels against the FP64 references, packed and not.

Letters: b batch, s sequence, H heads, D head dim, d hidden, f feed-forward width.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from k3train.ops import backends, quantile
from k3train.ops.attention import causal_attention
from k3train.ops.attn_res import attn_res
from k3train.ops.kda import delta_attention
from k3train.ops.packing import Packing
from k3train.ops.short_conv import short_conv
from k3train.ops.situ import situ_glu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BORDERS = {"whole": (), "packed": (5, 63, 64, 65, 200)}
EOD = -1


def usable(op: str, name: str) -> None:
    """Skip when the machine lacks what the backend needs."""
    reasons = {(row[0], row[1]): row[3] for row in backends.report()}
    if reason := reasons[op, name]:
        pytest.skip(reason)


def make_packing(b: int, s: int, borders: Sequence[int], device: str) -> Packing:
    tokens = torch.zeros(b, s, dtype=torch.long)
    tokens[0, list(borders)] = EOD
    return Packing.from_tokens(tokens.to(device), EOD)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rounded to `dtype` before the FP64 reference sees it, so that both start from the same numbers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype)


def compare(
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    bound: float,
    grad_bound: float | Sequence[float],
) -> list[tuple[Tensor, Tensor]]:
    """Hold `kernel` and its gradients on CUDA to `reference` in FP64 on CPU, by relative norm.

    Returns the gradients of both; those with a bound of infinity are left to the caller.
    """
    device = [x.cuda().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    output, expected = kernel(*device), reference(*exact)
    weight = normal(*expected.shape, seed=99)
    grads = torch.autograd.grad(output, device, weight.to(output))
    expected_grads = torch.autograd.grad(expected, exact, weight.double())
    assert relative(output, expected) <= bound
    errors = [relative(a, e) for a, e in zip(grads, expected_grads, strict=True)]
    bounds = [grad_bound] * len(errors) if isinstance(grad_bound, float) else grad_bound
    assert all(e <= limit for e, limit in zip(errors, bounds, strict=True)), errors
    return list(zip(grads, expected_grads, strict=True))


def relative(actual: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(actual).all()
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
def test_fla_kda(borders: tuple[int, ...]) -> None:
    usable("kda", "fla")
    b, s, H, D = 2, 300, 2, 128
    tokens = [normal(b, s, H, D, seed=i) for i in range(4)]
    beta = torch.sigmoid(normal(b, s, H, seed=4, dtype=torch.float32))
    A_log = 0.3 * normal(H, seed=5, dtype=torch.float32)
    dt_bias = normal(H * D, seed=6, dtype=torch.float32) - 2

    def run(device: str, backend: str) -> Callable[..., Tensor]:
        packing = make_packing(b, s, borders, device)
        return lambda *x: delta_attention(*x, lower_bound=-5.0, packing=packing, backend=backend)

    inputs = [*tokens, beta, A_log, dt_bias]
    # the decay's gradient is a difference of large terms, so rounding shows more in z, A_log and dt_bias
    bounds = (1e-2, 1e-2, 1e-2, 2e-2, 1e-2, math.inf, 2e-2)
    grads = compare(run("cuda", "fla"), run("cpu", "recurrent"), inputs, bound=1e-2, grad_bound=bounds)
    # dA_h sums z dz over a head's tokens and channels: terms of both signs that nearly cancel. Rounding is
    # measured against the size of such a sum, not against what is left of it.
    (grad_A, expected_A), (_, expected_z) = grads[5], grads[3]
    logits = tokens[3].double() + dt_bias.double().view(H, D)
    size = (logits * expected_z).square().sum((0, 1, 3)).sqrt()
    assert ((grad_A.double().cpu() - expected_A).abs() <= 2e-2 * size).all(), (grad_A, expected_A, size)


def test_fla_kda_stays_finite_at_the_lower_bound_of_the_gate() -> None:
    usable("kda", "fla")
    b, s, H, D = 1, 256, 1, 128
    q, k, v, z = (normal(b, s, H, D, seed=i) for i in range(4))
    inputs = [x.cuda().requires_grad_() for x in (q, k, v, z + 30, torch.ones(b, s, H).bfloat16())]
    constants = (torch.zeros(H, device="cuda"), torch.zeros(H * D, device="cuda"))
    packing = Packing.single(b, s, "cuda")
    output = delta_attention(*inputs, *constants, lower_bound=-5.0, packing=packing, backend="fla")
    grads = torch.autograd.grad(output.float().square().sum(), inputs)
    assert all(torch.isfinite(x).all() for x in (output, *grads))
    assert output.norm() > 0


def test_hopper_runs_without_the_choice_that_computes_wrongly() -> None:
    usable("kda", "fla")
    from k3train.ops.kda import fla

    fla.exclude_bad_hopper_choice(fla.HOPPER)
    tuner = getattr(fla.chunk_bwd, fla.FUSED_BACKWARD)
    while not hasattr(tuner, "configs"):
        tuner = tuner.fn
    choices = [(config.kwargs["BK"], config.num_warps) for config in tuner.configs]
    assert choices and (32, 4) not in choices


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("backend", ["fla", "shift"])
def test_short_conv(backend: str, borders: tuple[int, ...]) -> None:
    usable("short_conv", backend)
    b, s, C = 2, 300, 256
    inputs = [normal(b, s, C, seed=0), normal(C, 1, 4, seed=1, dtype=torch.float32)]

    def run(device: str, name: str) -> Callable[..., Tensor]:
        packing = make_packing(b, s, borders, device)
        return lambda x, weight: short_conv(x, weight, packing, name)

    compare(run("cuda", backend), run("cpu", "reference"), inputs, bound=5e-3, grad_bound=1e-2)


@pytest.mark.parametrize("backend", ["fla", "lean"])
@pytest.mark.parametrize("num_sources", [1, 4, 9])
def test_attn_res(num_sources: int, backend: str) -> None:
    usable("attn_res", backend)
    sources = [normal(2, 100, 512, seed=i) for i in range(num_sources)]
    query = 0.1 * normal(512, seed=20, dtype=torch.float32)
    weight = 1 + 0.1 * normal(512, seed=21, dtype=torch.float32)

    def run(name: str) -> Callable[..., Tensor]:
        return lambda q, w, *rows: attn_res(rows, q, w, backend=name)

    if num_sources == 1:  # the query has no say, and a zero gradient has no relative error
        fixed = (query, weight)
        compare(
            lambda *rows: attn_res(rows, *(x.cuda() for x in fixed), backend=backend),
            lambda *rows: attn_res(rows, *(x.double() for x in fixed), backend="reference"),
            sources, bound=5e-3, grad_bound=5e-3,
        )  # fmt: skip
    else:
        compare(run(backend), run("reference"), [query, weight, *sources], bound=5e-3, grad_bound=1e-2)


@pytest.mark.parametrize("f", [96, 3072, 1500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_situ(dtype: torch.dtype, f: int) -> None:
    usable("situ", "triton")
    bound = 5e-3 if dtype == torch.bfloat16 else 1e-5
    compare(
        lambda x: situ_glu(x, backend="triton"),
        lambda x: situ_glu(x, backend="reference"),
        [8 * normal(3, 17, 2 * f, seed=0, dtype=dtype)],
        bound=bound,
        grad_bound=bound,
    )


def test_triton_situ_takes_no_tokens() -> None:
    usable("situ", "triton")
    x = torch.zeros(0, 64, device="cuda", requires_grad=True)
    output = situ_glu(x, backend="triton")
    output.sum().backward()
    assert output.shape == (0, 32)
    assert x.grad is not None and x.grad.shape == (0, 64)


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("backend", ["te", "flash", "sdpa"])
def test_attention(backend: str, borders: tuple[int, ...]) -> None:
    usable("attention", backend)
    b, s, H = 2, 300, 4
    inputs = [normal(b, s, H, D, seed=D + i) for i, D in enumerate((192, 192, 128))]

    def run(device: str, name: str) -> Callable[..., Tensor]:
        packing = make_packing(b, s, borders, device)
        return lambda *x: causal_attention(*x, scale=192**-0.5, packing=packing, backend=name)

    compare(run("cuda", backend), run("cpu", "reference"), inputs, bound=1e-2, grad_bound=1.5e-2)


def test_packing_is_the_same_on_both_devices() -> None:
    here, there = (make_packing(2, 300, BORDERS["packed"], device) for device in ("cpu", "cuda"))
    assert torch.equal(here.cu_seqlens, there.cu_seqlens.cpu())
    assert torch.equal(here.document_ids, there.document_ids.cpu())
    assert here.max_seqlen == there.max_seqlen


def test_quantile_balancing_does_not_wait_for_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.sigmoid(torch.randn(512, 32, generator=generator) + torch.randn(32, generator=generator))
    bias = 0.1 * torch.randn(32, generator=generator)
    _, cutoff = quantile.route(scores, bias, 4)
    expected = quantile.required_bias_histogram(scores, cutoff, bias)
    on_device = [x.cuda() for x in (scores, cutoff, bias)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        indices, _ = quantile.route(on_device[0], on_device[2], 4)
        histogram = quantile.required_bias_histogram(*on_device)
        new_bias = quantile.bias_from_histogram(histogram, on_device[2], 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert indices.shape == (512, 4)
    assert (histogram.cpu() - expected).abs().sum() <= 4  # a value on a bin's border may round to either side
    torch.testing.assert_close(
        new_bias.cpu(), quantile.bias_from_histogram(expected, bias, 4), rtol=0, atol=3e-3
    )

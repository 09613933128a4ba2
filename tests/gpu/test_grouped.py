"""Grouped GEMM backends against the loop in FP64, with weights together, apart and in slots."""

import pytest
import torch
from torch import Tensor

from k3train.ops import backends, grouped
from k3train.ops.grouped import Segments, grouped_mm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOADS = {
    "ragged": [130, 0, 1, 257, 77, 0],
    "slots": [64, 300, 5, 12, 0, 0],
    "leading": [0, 0, 0, 33, 8, 190],
    "none": [0] * 6,
}
LAYOUTS = ("rising", "falling", "apart", "slots")


def usable(name: str) -> None:
    """Skip when the machine lacks what the backend needs."""
    if reason := next(row[3] for row in backends.report() if row[:2] == ("grouped", name)):
        pytest.skip(reason)


def weights_of(layout: str, o: int, i: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    stack = (i**-0.5 * torch.randn(6, o, i, generator=generator)).bfloat16().cuda()
    if layout == "slots":
        return [*stack[:4].clone(), *stack[4:].clone()]
    if layout == "apart":
        return [weight.clone() for weight in stack]
    return list(stack) if layout == "rising" else list(stack.flip(0))[::-1]


def close(actual: Tensor, wanted: Tensor) -> None:
    """Rounded to BF16 once."""
    assert actual.dtype == torch.bfloat16
    difference = (actual.double() - wanted).norm() / wanted.norm().clamp_min(1e-9)
    assert difference < 3e-3, difference.item()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["te", "grouped_mm", "loop", "auto"])
def test_output_and_gradients(backend: str, layout: str, load: str) -> None:
    if backend != "auto":
        usable(backend)
    counts, (i, o) = LOADS[load], (256, 136)
    generator = torch.Generator().manual_seed(0)
    rows, grad = (torch.randn(sum(counts), w, generator=generator).bfloat16().cuda() for w in (i, o))
    weights = [w.requires_grad_() for w in weights_of(layout, o, i)]
    rows.requires_grad_()
    segments = Segments.of(counts, "cuda")
    output = grouped.grouped_linear(rows, weights, segments, backend=backend)
    found = [output, *torch.autograd.grad(output, [rows, *weights], grad)]
    leaves = [x.detach().double().requires_grad_() for x in (rows, *weights)]
    exact = grouped.grouped_linear(leaves[0], leaves[1:], segments, backend="loop")
    wanted = [exact, *torch.autograd.grad(exact, leaves, grad.double())]
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.shape == expected.shape
        if expected.numel():
            close(actual, expected.detach())
    for count, gradient in zip(counts, found[2:], strict=True):
        assert count or not gradient.any()


@pytest.mark.parametrize("backend", ["te", "loop"])
def test_the_order_of_launch_changes_no_bit(backend: str) -> None:
    usable(backend)
    counts = LOADS["ragged"]
    segments, weights = Segments.of(counts, "cuda"), weights_of("apart", 136, 256)
    rows = torch.randn(sum(counts), 256, device="cuda").bfloat16()
    kernels = backends.resolve("grouped", backend, "cuda", torch.bfloat16).load()()
    a, b = (kernels.multiply(rows, weights, segments, segments.order(first)) for first in (False, True))
    assert torch.equal(a, b)


def test_a_choice_is_repeated_with_its_bits() -> None:
    counts = LOADS["ragged"]
    segments, weights = Segments.of(counts, "cuda"), weights_of("rising", 136, 256)
    rows = torch.randn(sum(counts), 256, device="cuda").bfloat16()
    a, b = (grouped.multiply(rows, weights, segments) for _ in range(2))
    assert torch.equal(a, b)


def test_grouped_mm_copies_no_weights_that_lie_at_equal_distances() -> None:
    usable("grouped_mm")
    counts = [64] * 6
    segments, rows = Segments.of(counts, "cuda"), torch.ones(384, 1024, device="cuda").bfloat16()
    peaks = []
    for layout in ("rising", "apart"):
        weights = weights_of(layout, 2048, 1024)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grouped.multiply(rows, weights, segments, backend="grouped_mm")
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] - peaks[0] > 5 * 2048 * 1024 * 2
    assert [grouped_mm.copied(weights_of(x, 8, 8), segments) for x in ("rising", "apart")] == [0, 6]

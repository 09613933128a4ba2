"""Long fragments as causal squares on CUDA, beside the kernel for documents of any length."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from k3train.ops.attention import Fragments, causal_attention
from tests.gpu.test_ops import normal, usable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

H, SCALE = 3, 192**-0.5


def errors(lengths: list[tuple[int, int]], backend: str) -> list[float]:
    """Relative norms of the difference to FP32 with the softmax written out: output, then gradients."""
    n, m = (sum(side) for side in zip(*lengths, strict=True))
    inputs = [
        normal(1, rows, H, width, seed=i) for i, (rows, width) in enumerate(((n, 192), (m, 192), (m, 128)))
    ]
    weight, packing = normal(1, n, H, 128, seed=3).cuda(), Fragments.of(lengths, "cuda")

    def found(dtype: torch.dtype, name: str) -> list[Tensor]:
        leaves = [x.cuda().bfloat16().to(dtype).requires_grad_() for x in inputs]
        output = causal_attention(*leaves, scale=SCALE, packing=packing, backend=name)
        return [output, *torch.autograd.grad(output, leaves, weight.to(output.dtype))]

    pairs = zip(found(torch.bfloat16, backend), found(torch.float32, "reference"), strict=True)
    return [((one.float() - exact).norm() / exact.norm()).item() for one, exact in pairs]


@pytest.mark.parametrize(
    "lengths", [[(1024, 1024)], [(700, 1999)], [(96, 96), (513, 900), (64, 1000), (800, 801)]]
)
def test_squares_are_as_exact_as_one_kernel(
    lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    usable("attention", "te")
    of = partial(errors, lengths)
    one = of("te")
    monkeypatch.setattr("k3train.ops.attention.fragments.LONG", 500)
    monkeypatch.setattr("k3train.ops.attention.pieces.NARROW", 64)
    squares = of("te")
    assert squares != one or all(n == m for n, m in lengths), "nothing was cut"
    for ours, theirs in zip(squares, one, strict=True):
        assert ours < 1.5 * theirs + 1e-4
        assert ours < 5e-3

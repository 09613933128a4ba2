"""The compiled MX codec against the reference, bit for bit, and quantised experts on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3train.config import QuantConfig
from k3train.errors import UserError
from k3train.ops import backends, grouped
from k3train.ops.grouped import Segments, grouped_linear
from k3train.quant import mx
from k3train.quant.mx import FORMATS, MXFP4, MXFP8_E4M3, ROUNDINGS, Format, reference
from k3train.quant.products import resolve
from k3train.quant.qat import ExpertQuantiser

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if reason := next(row[3] for row in backends.report() if row[:2] == ("mx", "triton")):
        pytest.skip(reason)


def items(dtype: torch.dtype) -> Tensor:
    """[4, 700, 96]: blocks at every magnitude that FP32 has, with what is special strewn in."""
    made = torch.Generator().manual_seed(5)
    exponents = torch.linspace(-149, 120, 8400).floor().view(4, 700, 3, 1)
    x = torch.ldexp(torch.randn(4, 700, 3, 32, generator=made), exponents).to(torch.float32)
    x.view(-1)[:: 32 * 101] = torch.nan
    x.view(-1)[5 :: 32 * 97] = torch.inf
    x[0, :7], x[1, :7] = 0.0, -0.0
    return x.flatten(2).to(dtype)


def equal(found: Tensor, expected: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    found = found.cpu()
    plain = torch.equal(found.nan_to_num(7.0).view(kind), expected.nan_to_num(7.0).view(kind))
    return plain and torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_fake_quantise(fmt: Format, rounding: str, dtype: torch.dtype) -> None:
    x = items(dtype)
    expected = reference.fake_quantise(x, fmt, rounding)
    found = mx.fake_quantise(x.cuda(), fmt, rounding, backend="triton")
    assert equal(found, expected)
    assert equal(mx.fake_quantise(found, fmt, rounding, backend="triton"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bytes_there_and_back(rounding: str, dtype: torch.dtype) -> None:
    x = items(dtype)
    packed = mx.to_bytes(x.cuda(), MXFP4, rounding, backend="triton")
    assert torch.equal(packed.cpu(), reference.to_bytes(x, MXFP4, rounding))
    values = mx.from_bytes(packed, x.shape[1:], MXFP4, dtype, backend="triton")
    assert equal(values, reference.fake_quantise(x, MXFP4, rounding))


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "te"])
def test_quantised_experts_have_the_gradients_of_rounded_ones(backend: str) -> None:
    if reason := next(row[3] for row in backends.report() if row[:2] == ("grouped", backend)):
        pytest.skip(reason)
    made = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device="cuda").bfloat16()

    qat, segments = (
        ExpertQuantiser(QuantConfig(), "cuda", torch.bfloat16),
        Segments.of([40, 0, 24, 64], "cuda"),
    )
    buffer, rows, grad = 0.02 * normal(4, 96, 128), normal(128, 128), normal(128, 96)
    real = [weight.clone().requires_grad_() for weight in buffer]
    rounded = [mx.fake_quantise(weight.detach(), MXFP4).requires_grad_() for weight in real]
    with qat.held():
        ours = grouped_linear(qat.rows(rows), real, segments, seen=qat.weights, backend=backend)
        ours.backward(grad)
    theirs = grouped_linear(mx.fake_quantise(rows, MXFP8_E4M3), rounded, segments, backend=backend)
    theirs.backward(grad)
    assert torch.equal(ours, theirs)
    for one, other in zip(real, rounded, strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_products_run_in_their_formats_or_say_why_not() -> None:
    """On devices without tensor cores for MX blocks the reason names the capability."""
    reason = next(row[3] for row in backends.report() if row[:2] == ("mx_products", "te"))
    if torch.cuda.get_device_capability() < (10, 0):
        assert reason and "needs compute capability 10.0" in reason
    if reason:
        assert resolve(QuantConfig(), "cuda", torch.bfloat16) is grouped.multiply
        with pytest.raises(UserError, match="quant.products=te"):
            resolve(QuantConfig(products="te"), "cuda", torch.bfloat16)
        return
    made = torch.Generator("cuda").manual_seed(3)
    rows = mx.fake_quantise(torch.randn(200, 512, generator=made, device="cuda").bfloat16(), MXFP8_E4M3)
    weights = torch.randn(4, 896, 512, generator=made, device="cuda").bfloat16()
    seen, segments = list(mx.fake_quantise(weights, MXFP4)), Segments.of([40, 0, 96, 64], "cuda")
    found = resolve(QuantConfig(products="te"), "cuda", torch.bfloat16)(rows, seen, segments)
    expected = grouped.multiply(rows.double(), [weight.double() for weight in seen], segments, backend="loop")
    assert (found.double() - expected).norm() <= 4e-3 * expected.norm()

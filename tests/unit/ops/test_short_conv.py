import pytest
import torch
from torch import Tensor

from k3train.ops.packing import Packing
from k3train.ops.short_conv import short_conv


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Packing]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 13, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64).requires_grad_()
    tokens = torch.ones(2, 13)
    tokens[0, [1, 6]] = tokens[1, 0] = 0
    return x, weight, Packing.from_tokens(tokens, 0)


@pytest.mark.parametrize("backend", ["shift", "reference"])
def test_a_token_by_hand(backend: str) -> None:
    x, weight, packing = make_inputs()
    output = short_conv(x, weight, packing, backend)
    token = sum(x[0, 9 - j] * weight[:, 0, 3 - j] for j in range(3))  # the document starts at 7
    torch.testing.assert_close(output[0, 9], torch.nn.functional.silu(token))


def test_shift_equals_reference_with_gradients() -> None:
    x, weight, packing = make_inputs()
    for borders in (packing, Packing.single(2, 13, "cpu")):
        outputs = [short_conv(x, weight, borders, backend) for backend in ("shift", "reference")]
        torch.testing.assert_close(*outputs)
        grads = [torch.autograd.grad(o.sin().sum(), (x, weight)) for o in outputs]
        torch.testing.assert_close(*grads)


def test_gradients_by_finite_differences() -> None:
    x, weight, packing = make_inputs()
    assert torch.autograd.gradcheck(lambda *a: short_conv(*a, packing, "shift"), (x, weight))


def test_shorter_than_the_kernel() -> None:
    x, weight, _ = make_inputs()
    packing = Packing.single(2, 2, "cpu")
    outputs = [short_conv(x[:, :2], weight, packing, backend) for backend in ("shift", "reference")]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*[torch.autograd.grad(o.sum(), (x, weight)) for o in outputs])


def test_bf16_rounds_once() -> None:
    x, weight, packing = make_inputs(torch.bfloat16)
    output = short_conv(x, weight, packing)
    exact = short_conv(x.double(), weight, packing)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, exact.bfloat16())

import pytest
import torch
from torch import Tensor

from k3train.ops.attention import causal_attention
from k3train.ops.packing import Packing


def make_inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 12, 3, 6), (2, 12, 3, 6), (2, 12, 3, 4))
    return [
        torch.randn(x, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes
    ]


def make_packings() -> list[Packing]:
    return [Packing.single(2, 12, "cpu"), Packing.from_tokens(torch.arange(24).view(2, 12), 5)]


def test_a_token_by_hand() -> None:
    q, k, v = make_inputs()
    output = causal_attention(q, k, v, scale=0.4, packing=make_packings()[1], backend="reference")
    logits = 0.4 * k[0, 6:9, 1] @ q[0, 8, 1]  # its document starts at 6
    torch.testing.assert_close(output[0, 8, 1], logits.softmax(0) @ v[0, 6:9, 1])


@pytest.mark.parametrize("packing", make_packings(), ids=["whole", "packed"])
def test_sdpa_equals_reference_with_gradients(packing: Packing) -> None:
    inputs = make_inputs()
    outputs = [
        causal_attention(*inputs, scale=0.4, packing=packing, backend=b) for b in ("sdpa", "reference")
    ]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*[torch.autograd.grad(o.sin().sum(), inputs) for o in outputs])


def test_reference_keeps_fp32_for_bf16_inputs() -> None:
    inputs = make_inputs(torch.bfloat16)
    output = causal_attention(*inputs, scale=0.4, packing=make_packings()[0], backend="reference")
    exact = causal_attention(*(x.double() for x in inputs), scale=0.4, packing=make_packings()[0])
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-6)

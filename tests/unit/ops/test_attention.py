import pytest
import torch
from torch import Tensor

from k3train.ops.attention import Fragments, causal_attention
from k3train.ops.attention.fragments import borders
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


LENGTHS = [(3, 7), (1, 1), (4, 4), (1, 9), (2, 3)]


def fragment_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    n, m = (sum(side) for side in zip(*LENGTHS, strict=True))
    shapes = ((1, n, 3, 6), (1, m, 3, 6), (1, m, 3, 4))
    return [torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_fragments_are_the_ends_of_documents(backend: str) -> None:
    """Against each fragment by itself, as the last queries of a square one."""
    inputs = fragment_inputs()
    packing = Fragments.of(LENGTHS, "cpu")
    output = causal_attention(*inputs, scale=0.4, packing=packing, backend=backend)
    expected = []
    for (n, m), q, k, v in zip(
        LENGTHS, *(x.split([each[i > 0] for each in LENGTHS], 1) for i, x in enumerate(inputs)), strict=True
    ):
        square = torch.cat((torch.zeros(1, m - n, *q.shape[2:], dtype=q.dtype), q), dim=1)
        whole = causal_attention(
            square, k, v, scale=0.4, packing=Packing.single(1, m, "cpu"), backend="reference"
        )
        expected.append(whole[:, m - n :])
    torch.testing.assert_close(output, torch.cat(expected, dim=1))
    grads = (torch.autograd.grad(o.sin().sum(), inputs) for o in (output, torch.cat(expected, dim=1)))
    torch.testing.assert_close(*grads)


def test_square_fragments_are_a_packing() -> None:
    packing = make_packings()[1]
    lengths = [(n, n) for n in packing.cu_seqlens.diff().tolist()]
    fragments = Fragments.of(lengths, "cpu")
    for ours, theirs in zip(borders(fragments), borders(packing), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    flat = [x.detach().flatten(0, 1)[None] for x in make_inputs()]
    ours = causal_attention(*flat, scale=0.4, packing=fragments, backend="reference")
    theirs = causal_attention(*make_inputs(), scale=0.4, packing=packing, backend="reference")
    torch.testing.assert_close(ours, theirs.flatten(0, 1)[None])


def test_mask_of_fragments_by_hand() -> None:
    mask = Fragments.of([(2, 3), (1, 1)], "cpu").attention_mask
    assert mask.int().tolist() == [[[[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]]]


def test_keys_of_some_queries() -> None:
    fragments = Fragments.of(LENGTHS, "cpu")
    mask = fragments.attention_mask[0, 0]
    for start in range(mask.shape[0]):
        for stop in range(start + 1, mask.shape[0] + 1):
            keys = fragments.keys_of(start, stop)
            seen = mask[start:stop].any(0).nonzero().flatten()
            assert (keys.start, keys.stop) == (seen[0], seen[-1] + 1)
            assert torch.equal(fragments.mask(slice(start, stop), keys), mask[start:stop, keys])

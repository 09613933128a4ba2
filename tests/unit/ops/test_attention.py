import pytest
import torch
from torch import Tensor

from k3train.ops.attention import Fragments, causal_attention
from k3train.ops.attention.fragments import borders
from k3train.ops.attention.pieces import WrittenOut, attend_in_pieces, tiles
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


@pytest.mark.parametrize("narrow", [1, 2, 100])
@pytest.mark.parametrize("long", [1, 2, 3, 100])
def test_pieces_of_fragments(long: int, narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares joined, each with a backward that knows the whole softmax only by its sum."""
    monkeypatch.setattr("k3train.ops.attention.fragments.LONG", long)
    monkeypatch.setattr("k3train.ops.attention.pieces.NARROW", narrow)
    inputs, packing, short_ones = fragment_inputs(), Fragments.of(LENGTHS, "cpu"), []

    def reference(q: Tensor, k: Tensor, v: Tensor, fragments: Fragments) -> Tensor:
        return causal_attention(q, k, v, scale=0.4, packing=fragments, backend="reference")

    def short(q: Tensor, k: Tensor, v: Tensor, fragments: Fragments) -> Tensor:
        short_ones.extend(fragments.lengths)
        return reference(q, k, v, fragments)

    output = attend_in_pieces(*inputs, 0.4, packing, WrittenOut(), short)
    expected = reference(*inputs, packing)
    assert short_ones == [each for each in LENGTHS if each[0] < long]
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)
    grads = (torch.autograd.grad(o.sin().sum(), inputs) for o in (output, expected))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "n, m", [(1 << 17, 3 << 16), (1 << 16, 1 << 18), (131072, 196609), (8192, 1_000_001)]
)
def test_tiles_cover_what_queries_see_once_and_are_few(n: int, m: int) -> None:
    area = 0
    for tile in tiles(n, m):
        rows, columns = (x.stop - x.start for x in (tile.queries, tile.keys))
        assert rows == columns or not tile.causal
        area += rows * (rows + 1) // 2 if tile.causal else rows * columns
        assert tile.causal or min(rows, columns) < 1024
    assert area == n * (m - n) + n * (n + 1) // 2
    assert len(tiles(n, m)) <= 2 * (m // n) + 6


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

"""Parts of Gated MLA across ranks that need no ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from k3train.config import ModelConfig
from k3train.context_plan import deal, joined
from k3train.model.mla_context import (
    _Expansion,
    _Product,
    _Sum,
    assignment,
    fragment_lengths,
    keys_values_reference,
)
from k3train.ops.packing import Packing, Span

MODEL = ModelConfig(num_heads=4, kv_lora_rank=5, qk_nope_head_dim=3, qk_extra_head_dim=2, v_head_dim=4)
RANGES = ((0, 2, 9), (1, 0, 4), (0, 0, 6))


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_expansion_in_groups_of_heads(heads: int) -> None:
    """Overlapping ranges of two rows; the gradient of the latents comes once, from whoever is last."""
    gathered, weight = normal(2, 9, 7, seed=1), normal(4 * 7, 5, seed=2)
    expected = keys_values_reference(MODEL, RANGES, 4, gathered, weight)
    groups = weight.unflatten(0, (4, -1)).split(heads)
    total = _Sum(len(groups))
    parts = [_Expansion.apply(gathered, group.flatten(0, 1), MODEL, RANGES, heads, total) for group in groups]
    found = [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]
    torch.testing.assert_close(found, list(expected))
    grads = [
        torch.autograd.grad(sum(x.sin().sum() for x in results), (gathered, weight), retain_graph=True)
        for results in (found, expected, found)
    ]
    torch.testing.assert_close(grads[0], grads[1])
    assert all(map(torch.equal, grads[0], grads[2])), "a second backward starts from zero"


def test_product_in_groups_of_heads() -> None:
    x, weights = normal(6, 5, seed=1), normal(3, 4, 5, seed=2)
    total = _Sum(3)
    found = torch.cat([_Product.apply(x, weight, total) for weight in weights], dim=1)
    expected = x @ weights.flatten(0, 1).T
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each.sin().sum(), (x, weights)) for each in (found, expected))
    )


def test_sums_are_wider_than_what_is_added() -> None:
    """Of BF16 as many as 256 + 1/2 + 1/2, which BF16 would lose one by one."""
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    total = _Sum(5)
    weights = [torch.tensor([[value]], dtype=torch.bfloat16) for value in (256.0, 0.5, 0.5, 0.5, 0.5)]
    sum(_Product.apply(x, weight, total) for weight in weights).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 258


def test_fragments_of_blocks_in_several_documents() -> None:
    documents = [0, 3, 10, 16, 24, 32]  # two rows of 16
    dealt = deal(documents, 2, [0, 8, 16], 0.0)
    for blocks in dealt.computed:
        lengths = fragment_lengths(joined(blocks), documents, 16)
        expected = []
        for block in joined(blocks):
            places = range(block.row * 16 + block.start, block.row * 16 + block.stop)
            starts = [max(d for d in documents if d <= place) for place in places]
            for document in sorted(set(starts)):
                last = max(place for place, start in zip(places, starts, strict=True) if start == document)
                expected.append((starts.count(document), last + 1 - document))
        assert lengths == expected
        assert sum(queries for queries, _ in lengths) == sum(block.tokens for block in blocks)


def test_the_part_of_a_rank() -> None:
    """One document of 8 tokens on two ranks; made once, and forgotten with its micro-batch."""
    group: Any = object()
    span = Span(group, (0, 4, 8), Packing.single(1, 8, "cpu"))
    span.__dict__["rank"] = 0
    model = ModelConfig(kv_lora_rank=1)
    found = assignment(model, span)
    assert found is assignment(model, span)
    # Pairs of two tokens each: 3, 7, 11, 15; the first and the last pair are for rank 0.
    assert found.home == ((2, 0), (2, 1))
    assert found.computed == ((2, 0), (2, 1))
    assert found.key_ranges == ((0, 0, 2), (0, 0, 8))
    assert found.fragments.lengths == ((2, 2), (2, 8))
    assert found.most_keys == 10
    gone = weakref.ref(span)
    del span
    gc.collect()
    assert gone() is None

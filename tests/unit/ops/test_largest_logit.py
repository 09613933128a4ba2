"""The largest logit of each head against all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3train.ops.attention import Fragments, largest_logit
from k3train.ops.attention.largest_logit import largest_logits, largest_logits_reference
from k3train.ops.packing import Packing

SCALE = 24**-0.5


def inputs(seed: int = 0, b: int = 2, s: int = 50, heads: int = 5, width: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(b, s, heads, width, generator=generator) for _ in range(2))
    return q * torch.tensor([0.1, 1.0, 3.0, 10.0, 0.01])[:, None], k


def packing() -> Packing:
    tokens = torch.randint(0, 20, (2, 50), generator=torch.Generator().manual_seed(1))
    return Packing.from_tokens(tokens, 0)


@pytest.mark.parametrize("queries", [7, 1024])
def test_equals_the_largest_of_all_logits(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_logit, "QUERIES", queries)
    q, k = inputs()
    found = largest_logits(q, k, scale=SCALE, packing=packing(), above=0.0)
    expected = largest_logits_reference(q, k, scale=SCALE, packing=packing())
    torch.testing.assert_close(found, expected)


def test_never_misses_a_head_above_the_bound_and_skips_short_ones() -> None:
    q, k = inputs()
    expected = largest_logits_reference(q, k, scale=SCALE, packing=packing())
    for bound in (0.5, 2.0, 5.0, 1e3):
        found = largest_logits(q, k, scale=SCALE, packing=packing(), above=bound)
        over = expected > bound
        torch.testing.assert_close(found[over], expected[over])
        assert found[4] == 0
    assert torch.equal(found, torch.zeros(5))


def test_other_documents_and_later_tokens_do_not_count() -> None:
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
    q[..., 0] = 1
    k[0, :, 0, 0] = torch.tensor([5.0, 1.0, 2.0, 9.0])
    cut = Packing.from_tokens(torch.tensor([[1, 0, 1, 1]]), 0)  # documents of 2 and 2 tokens
    q[0, 3], q[0, 1] = 0.1, 0.5
    # 5 is seen by tokens 0 and 1 alone, 9 by token 3 alone.
    assert largest_logits(q, k, scale=1.0, packing=cut, above=0.0).tolist() == [5.0]
    k[0, 0, 0, 0] = 0
    assert largest_logits(q, k, scale=1.0, packing=cut, above=0.0).tolist() == [2.0]


@pytest.mark.parametrize(("queries", "products"), [(3, 1 << 27), (1024, 1 << 27), (1024, 25)])
def test_fragments(queries: int, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_logit, "QUERIES", queries)
    monkeypatch.setattr(largest_logit, "PRODUCTS", products)
    fragments = Fragments.of([(7, 20), (1, 1), (4, 4), (9, 25)], "cpu")
    q, k = inputs(b=1, s=50)
    q = q[:, :21]
    found = largest_logits(q, k, scale=SCALE, packing=fragments, above=0.0)
    expected = largest_logits_reference(q, k, scale=SCALE, packing=fragments)
    torch.testing.assert_close(found, expected)
    loose = scale_of_all(q, k)
    assert (expected < loose).any()


def scale_of_all(q: Tensor, k: Tensor) -> Tensor:
    """Largest of all logits, whoever may see them."""
    return SCALE * torch.einsum("bihd,bjhd->bhij", q, k).amax((0, 2, 3))

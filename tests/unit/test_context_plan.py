"""How query blocks are dealt to the ranks of a context group, against pairs counted one by one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from k3train import context_plan
from k3train.config import ModelConfig
from k3train.context_plan import Deal, deal, heads_at_once, imbalance, joined, key_cost, mla_bytes

MIB = 1 << 20
K3 = ModelConfig(
    num_layers=93,
    hidden_size=7168,
    num_heads=96,
    kda_head_dim=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_extra_head_dim=64,
    v_head_dim=128,
    dtype="bfloat16",
)


def even(length: int, ranks: int) -> list[int]:
    return [length * rank // ranks for rank in range(ranks + 1)]


def packed(length: int, rows: int, mean: float, seed: int) -> list[int]:
    """Borders of documents of some exponential length; rows are documents' borders."""
    generator, borders = random.Random(seed), [0]
    for row in range(rows):
        while borders[-1] < (row + 1) * length:
            step = 1 + int(generator.expovariate(1 / mean))
            borders.append(min(borders[-1] + step, (row + 1) * length))
    return borders


def pairs_by_hand(documents: list[int], places: range) -> int:
    return sum(place - max(border for border in documents if border <= place) + 1 for place in places)


def check(dealt: Deal, documents: list[int], rows: int, starts: list[int]) -> None:
    """Every token once, at home where it is said to be; keys and costs as counted."""
    length, seen = starts[-1], []
    for blocks in dealt.computed:
        assert blocks and list(blocks) == sorted(blocks)
        for block in blocks:
            first = block.row * length
            seen += range(first + block.start, first + block.stop)
            assert starts[block.home] <= block.start < block.stop <= starts[block.home + 1]
            assert block.cost == pairs_by_hand(documents, range(first + block.start, first + block.stop))
            document = max(border for border in documents if border <= first + block.start)
            assert block.keys == document - first >= 0
    assert sorted(seen) == list(range(rows * length))


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("mean", [3, 40, 1e6])
@pytest.mark.parametrize("shares", ["even", "uneven", "one token"])
def test_every_token_is_computed_once(ranks: int, mean: float, shares: str) -> None:
    length, rows = 60, 2
    starts = {
        "even": even(length, ranks),
        "uneven": [0, *sorted(random.Random(1).sample(range(1, length), ranks - 1)), length],
        "one token": [*range(ranks), length],
    }[shares]
    documents = packed(length, rows, mean, 3)
    dealt = deal(documents, rows, starts, 2.0)
    check(dealt, documents, rows, starts)
    shares_of_ranks = [range(a, z) for a, z in pairwise(starts)]
    for rank, columns in enumerate(shares_of_ranks):
        by_hand = sum(
            pairs_by_hand(documents, range(row * length + columns.start, row * length + columns.stop))
            for row in range(rows)
        )
        assert dealt.contiguous[rank] == by_hand
    assert sum(dealt.costs) == sum(dealt.contiguous)
    assert imbalance(dealt.costs) <= imbalance(dealt.contiguous)


@pytest.mark.parametrize(("ranks", "contiguous"), [(2, 1.5), (4, 1.75), (8, 1.875), (32, 1.96875)])
def test_one_long_document_is_balanced_and_half_of_it_stays_at_home(ranks: int, contiguous: float) -> None:
    dealt = deal((0, MIB), 1, even(MIB, ranks), key_cost(K3))
    assert imbalance(dealt.costs) == pytest.approx(1, abs=1e-9)
    assert imbalance(dealt.contiguous) == pytest.approx(contiguous, rel=1e-5)
    assert set(dealt.tokens) == {MIB // ranks}
    assert dealt.moved_tokens == MIB // 2
    # Blocks early and late in the row, in pairs: their keys are as many as the row and one block.
    assert max(dealt.key_rows) == MIB + MIB // (2 * ranks)


@pytest.mark.parametrize(
    ("length", "ranks", "mean", "bound"),
    [
        (MIB, 8, 50_000, 1.03),
        (MIB, 16, 200_000, 1.03),
        (MIB // 4, 4, 60_000, 1.04),
        (MIB // 4, 8, 30_000, 1.06),
    ],
)
def test_packed_documents(length: int, ranks: int, mean: float, bound: float) -> None:
    for seed in range(3):
        dealt = deal(packed(length, 1, mean, seed), 1, even(length, ranks), key_cost(K3))
        assert imbalance(dealt.costs) < bound < imbalance(dealt.contiguous)
        assert max(dealt.tokens) == length // ranks


def test_nothing_moves_where_the_shares_are_balanced() -> None:
    documents = list(range(0, 4097, 64))
    dealt = deal(documents, 1, even(4096, 4), key_cost(K3))
    assert not dealt.moves
    assert dealt.costs == dealt.contiguous
    assert [len(blocks) for blocks in dealt.computed] == [1] * 4


def test_uneven_shares_get_about_as_many_tokens() -> None:
    starts = [0, 100, 101, 700, 1000]
    dealt = deal((0, 1000), 1, starts, 0.0)
    assert imbalance(dealt.costs) < 1.1
    largest = max(block.tokens for blocks in dealt.computed for block in blocks)
    assert max(dealt.tokens) < 1000 / 4 + largest


def test_neighbours_share_their_keys() -> None:
    dealt = deal((0, 40), 1, [0, 20, 40], 0.0)
    assert [[(block.start, block.stop) for block in blocks] for blocks in dealt.computed] == [
        [(0, 10), (30, 40)],
        [(10, 20), (20, 30)],
    ]
    assert joined(dealt.computed[0]) == list(dealt.computed[0])
    (whole,) = joined(dealt.computed[1])
    assert (whole.start, whole.stop, whole.keys, whole.cost) == (10, 30, 0, sum(range(11, 31)))
    assert dealt.key_rows == (10 + 40, 30)


def test_fewer_tokens_than_ranks() -> None:
    with pytest.raises(ValueError, match="3 tokens cannot be attended to by 4 ranks"):
        deal((0, 3), 1, [0, 1, 2, 3, 3], 0.0)
    check(deal((0, 4), 1, [0, 4, 4, 4, 4], 0.0), [0, 4], 1, [0, 4, 4, 4, 4])


def test_expansion_of_a_key_in_pairs() -> None:
    assert key_cost(K3) == 512 * 256 / 320


def test_heads_at_once_fit() -> None:
    one_head = 1000 * 320 * 2
    assert heads_at_once(K3, 1000, 2) == 96
    for rows in (MIB // 8, MIB, 4 * MIB, 100 * MIB):
        heads = heads_at_once(K3, rows, 2)
        assert 96 % heads == 0
        assert heads == 1 or heads * rows * 320 * 2 <= context_plan.KEY_BYTES
    assert heads_at_once(K3, 1000, 2) * one_head <= context_plan.KEY_BYTES


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_memory_of_a_layer_at_a_million_tokens(ranks: int) -> None:
    found = mla_bytes(K3, MIB, ranks)
    assert (found.max_over_mean, found.heads) == (pytest.approx(1), 3)
    rows = MIB + MIB // (2 * ranks)
    assert found.gathered == MIB * 576 * 2
    assert found.expanded == rows * 3 * 320 * 2 <= context_plan.KEY_BYTES
    assert found.kept == rows * 96 * 320 * 2 == 32 * found.expanded
    # Keys, values, their gradients, these side by side; latents, their rows, gradients in FP32 and rounded.
    assert found.backward == rows * (3 * (2 * 320 + 256) + 2 * 576) * 2 + MIB * 576 * (2 + 4 + 4)
    assert found.backward < 14 * 2**30
    tokens = MIB // ranks
    assert found.queries == tokens * (1536 + 96 * (192 + 128 + 128)) * 2

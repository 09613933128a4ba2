"""How images are shared out over a context group, and how keys and values would travel."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from k3train.errors import UserError
from k3train.vision_config import VisionConfig
from k3train.vision_context import Assignment, Piece, assign, key_bytes, key_plan, key_price
from k3train.vision_shapes import Grid, image_cost, patches, tokens
from launch.compose import compose

MOONVIT = VisionConfig(enabled=True)
OUT = 7168
LINK = key_bytes(MOONVIT, 2) / 450e9 * 989e12 * 0.4
"""Price of keys and values inside a node of H100s."""


def mixed(count: int, seed: int = 0) -> list[Grid]:
    draw = random.Random(seed)
    return [
        (draw.choice([1, 1, 1, 2, 4]), 2 * draw.randint(4, 40), 2 * draw.randint(4, 40)) for _ in range(count)
    ]


CASES: dict[str, list[Grid]] = {
    "one image": [(1, 256, 256)],
    "one clip": [(4, 128, 128)],
    "many": mixed(40),
    "one large among many": [*mixed(20), (1, 256, 256), *mixed(5, 1)],
    "fewer than ranks": [(1, 64, 64), (1, 30, 18)],
    "flat": [(1, 2, 400)],
    "equal": [(1, 16, 16)] * 5,
}


def rows_of(found: Assignment, item: int) -> list[int]:
    pieces = [found.piece(item, rank) for rank in range(found.ranks)]
    return [row for piece in pieces for row in range(piece.first, piece.stop)]


@pytest.mark.parametrize("price", [0.0, LINK, 10 * LINK])
@pytest.mark.parametrize("ranks", [2, 3, 6, 16])
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_somewhere_once_and_sub_groups_are_neighbours(
    name: str, ranks: int, price: float
) -> None:
    grids = CASES[name]
    found = assign(MOONVIT, OUT, grids, ranks, price)
    assert found == assign(MOONVIT, OUT, grids, ranks, price)
    for item, (_, h, _) in enumerate(grids):
        assert rows_of(found, item) == list(range(h))
        assert all(border % MOONVIT.merge == 0 for border in found.borders[item])
        members = found.members(item)
        assert members and found.borders[item] == tuple(sorted(found.borders[item]))
    assert sum(found.loads) == pytest.approx(sum(image_cost(MOONVIT, OUT, grid) for grid in grids))
    counts = found.tokens(MOONVIT.merge)
    assert [sum(each) for each in counts] == [tokens(MOONVIT, grid) for grid in grids]


def test_one_rank_has_everything_whole() -> None:
    found = assign(MOONVIT, OUT, CASES["many"], 1, LINK)
    assert [piece for _, piece in found.pieces(0)] == [Piece(g, 0, g[1]) for g in CASES["many"]]
    assert not found.is_cut


@pytest.mark.parametrize(
    ("name", "ranks", "most"),
    [
        ("one image", 2, 1.001), ("one image", 8, 1.001), ("one clip", 4, 1.001), ("many", 4, 1.01),
        ("many", 8, 1.03), ("one large among many", 4, 1.01), ("one large among many", 8, 1.03),
        ("equal", 4, 1.001),
    ],
)  # fmt: skip
def test_loads_are_level(name: str, ranks: int, most: float) -> None:
    assert assign(MOONVIT, OUT, CASES[name], ranks).imbalance <= most


def test_only_what_must_be_is_cut() -> None:
    grids = CASES["one large among many"]
    found = assign(MOONVIT, OUT, grids, 4, LINK)
    assert [item for item in range(len(grids)) if len(found.members(item)) > 1] == [20]
    assert found.members(20) == [0, 1, 2, 3]
    # The large one alone: 65,536 of all patches, most of the cost.
    assert found.imbalance < 1.01


def test_a_large_image_gets_a_sub_group_beside_whole_ones() -> None:
    grids = [(1, 128, 128), (1, 106, 106), (1, 106, 106)]
    assert image_cost(MOONVIT, OUT, grids[0]) == pytest.approx(
        2 * image_cost(MOONVIT, OUT, grids[1]), rel=0.1
    )
    found = assign(MOONVIT, OUT, grids, 4, LINK)
    assert len(found.members(0)) == 2
    assert {len(found.members(item)) for item in (1, 2)} == {1}
    assert not set(found.members(1)) & set(found.members(0))


def test_what_costs_more_to_send_than_to_compute_stays_whole() -> None:
    grids = [(1, 32, 32)]
    assert len(assign(MOONVIT, OUT, grids, 4, 0.0).members(0)) == 4
    assert len(assign(MOONVIT, OUT, grids, 4, 10 * LINK).members(0)) == 1
    # Attention grows with the square of the patches, what is sent does not.
    assert len(assign(MOONVIT, OUT, [(1, 256, 256)], 4, 10 * LINK).members(0)) == 4


def test_a_rank_that_is_behind_gets_fewer_rows_of_a_cut_item() -> None:
    found = assign(MOONVIT, OUT, [(1, 40, 40), (1, 38, 38), (1, 36, 36)], 2, LINK)
    assert [found.members(item) for item in range(3)] == [[0], [1], [0, 1]]
    first, second = (found.piece(2, rank) for rank in (0, 1))
    assert first.stop == second.first < 36 // 2
    assert found.imbalance < 1.02


def test_price_follows_the_bandwidth_between_the_ranks() -> None:
    config = compose(["recipe=tiny", "cluster.link_gbps=100", "cluster.network_gbps=10"])
    config.cluster.peak_tflops, config.cluster.gpus_per_node, config.parallel.context = 1000.0, 4, 4
    config.model.dtype = "bfloat16"
    inside = key_price(config)
    size = config.vision.depth * 2 * config.vision.num_heads * config.vision.head_dim * 2
    assert inside == pytest.approx(size / 100e9 * 1000e12 * config.cluster.efficiency.dense_gemm)
    config.parallel.context = 8
    assert key_price(config) == pytest.approx(10 * inside)


def test_a_grid_that_cannot_work_is_refused_before_anything_is_exchanged() -> None:
    with pytest.raises(UserError, match="item 1: grid .* 3 x 4 does not divide by vision.merge=2"):
        assign(MOONVIT, OUT, [(1, 4, 4), (1, 3, 4)], 2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_keys_of_an_item_reach_each_of_its_ranks(ranks: int) -> None:
    grids = CASES["one large among many"][14:] + [(2, 40, 20)] * 3
    found = assign(replace(MOONVIT, depth=2), OUT, grids, ranks)
    assert found.is_cut
    plans = [key_plan(found, rank) for rank in range(ranks)]
    # Every patch is called (item, rank that has it, number there).
    owned = [
        [(item, rank, number) for item, piece in found.pieces(rank) for number in range(piece.patches)]
        for rank in range(ranks)
    ]
    given = []
    for rank, plan in enumerate(plans):
        rows = [row for start, stop in plan.give for row in owned[rank][start:stop]]
        parts = []
        for count in plan.send:
            parts.append(rows[:count])
            rows = rows[count:]
        assert not rows
        given.append(parts)
    for rank, plan in enumerate(plans):
        came = [row for other in range(ranks) for row in given[other][rank]]
        assert plan.receive == tuple(len(given[other][rank]) for other in range(ranks))
        taken = [row for start, stop in plan.take for row in came[start:stop]]
        items = [item for item, _ in found.pieces(rank)]
        assert plan.lengths == tuple(patches(grids[item]) for item in items)
        expected = [
            (item, other, number)
            for item in items
            for other in found.members(item)
            for number in range(found.piece(item, other).patches)
        ]
        # Numbers count from the rank's first piece in `taken`, from each piece's first patch in `expected`.
        assert [row[:2] for row in taken] == [row[:2] for row in expected]
        assert len(set(taken)) == len(taken)


def test_a_rank_without_a_piece_gives_and_gets_nothing() -> None:
    grids = [(1, 4, 400)]
    found = assign(MOONVIT, OUT, grids, 4)
    assert found.members(0) == [0, 1]
    plan = key_plan(found, 3)
    assert plan.give == plan.take == plan.lengths == ()
    assert plan.send == plan.receive == (0, 0, 0, 0)

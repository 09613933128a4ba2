"""The one-pass fill: sound for every schedule, within its cap, and near the insertion of each part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel.pipeline import vision_fill
from parallel.pipeline.build import build
from parallel.pipeline.check import check
from parallel.pipeline.simulate import Costs, simulate, uniform
from parallel.pipeline.table import VISION_BACKWARD, VISION_FORWARD, Table
from parallel.pipeline.vision_dispatch import dispatch
from parallel.pipeline.vision_fill import default_sizes, fill, hidden_fraction, vision_peaks, without_vision


def case(
    schedule: str, p: int, v: int, m: int, share: float = 0.02, parts: int = 4, hop: float = 0.0
) -> tuple[Table, Costs]:
    """Stages of which the last is the fastest, and bundles of `share` of the language model's time."""
    table = build(schedule, p, v, m)
    part = share * p * v / parts
    costs = uniform(table.layout, parts=[parts] * m, vision_forward=part, vision_backward=2 * part, hop=hop)
    forward = [1.0] * (table.layout.stages - 1) + [0.7]
    return table, replace(costs, forward=forward, backward=[2 * each for each in forward])


def filled(table: Table, costs: Costs, cap: float = float("inf")) -> Table | None:
    ranks = dispatch(table, costs, cap, default_sizes(costs))
    return None if ranks is None else replace(table, ranks=ranks, parts=tuple(map(len, costs.vision_forward)))


@pytest.mark.parametrize("hop", [0.0, 0.1])
@pytest.mark.parametrize(
    ("schedule", "v"), [("1f1b", 1), ("interleaved", 2), ("zb1p", 1), ("zbv", 2), ("gpipe", 1)]
)
def test_each_part_once_on_one_rank_and_the_order_kept(schedule: str, v: int, hop: float) -> None:
    table, costs = case(schedule, 4, v, 8, hop=hop)
    found = filled(table, costs)
    assert found is not None
    check(found)
    assert without_vision(found).ranks == table.ranks
    places = [
        sorted(
            (op.microbatch, op.chunk, rank)
            for rank, ops in enumerate(found.ranks)
            for op in ops
            if op.kind == kind
        )
        for kind in (VISION_FORWARD, VISION_BACKWARD)
    ]
    assert places[0] == places[1]
    assert [place[:2] for place in places[0]] == [(k, j) for k in range(8) for j in range(4)]


@pytest.mark.parametrize("cap", [float("inf"), 3.0, 2.0])
def test_it_holds_no_more_than_its_cap_and_hides_most(cap: float) -> None:
    table, costs = case("1f1b", 4, 1, 32)
    costs = replace(costs, forward=[1.0, 0.8, 0.8, 0.8], backward=[2.0, 1.6, 1.6, 1.6])
    found = filled(table, costs, cap)
    assert found is not None
    assert max(vision_peaks(found, default_sizes(costs))) <= cap
    assert hidden_fraction(found, costs) >= 0.8


def test_nothing_fits_under_a_cap_below_what_is_under_way() -> None:
    """Four ranks have four micro-batches under way, 16 parts of a quarter each: they need 1 on each rank."""
    table, costs = case("1f1b", 4, 1, 16)
    assert filled(table, costs, 0.75) is None
    assert filled(table, costs, 0.2) is None


def test_only_ranks_that_wait_work_for_the_tower() -> None:
    """The first rank computes all the time, but for its ends."""
    table, costs = case("1f1b", 4, 1, 64)
    slow = replace(costs, forward=[1.0, 0.8, 0.8, 0.8], backward=[2.0, 1.6, 1.6, 1.6])
    found = filled(table, slow)
    assert found is not None
    counts = [sum(op.kind == VISION_FORWARD for op in ops) for ops in found.ranks]
    assert sum(counts) == 256 and counts[0] < 8
    alone = simulate(table, replace(slow, vision_forward=(), vision_backward=())).makespan
    assert simulate(found, slow).makespan < alone * 1.003


def test_large_tables_take_it_where_nothing_can_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    table, costs = case("1f1b", 4, 1, 32, share=0.001)
    slow = fill(table, costs)
    monkeypatch.setattr(vision_fill, "EFFORT", 1)
    with monkeypatch.context() as patched:
        patched.setattr(vision_fill, "Network", None)
        quick = fill(table, costs)
    simple = filled(table, costs)
    assert simple is not None and quick.ranks == simple.ranks
    least = simulate(table, replace(costs, vision_forward=(), vision_backward=())).makespan
    assert simulate(quick, costs).makespan <= least * (1 + vision_fill.NEGLIGIBLE)
    assert simulate(quick, costs).makespan <= simulate(slow, costs).makespan * (1 + vision_fill.NEGLIGIBLE)


def test_large_tables_with_much_work_are_filled_with_care(monkeypatch: pytest.MonkeyPatch) -> None:
    table, costs = case("1f1b", 4, 1, 16, share=0.2)
    monkeypatch.setattr(vision_fill, "EFFORT", 1)
    careful = fill(table, costs)
    quick = filled(table, costs)
    assert quick is not None and careful.ranks != quick.ranks
    assert simulate(careful, costs).makespan <= simulate(quick, costs).makespan * (1 + 1e-9)


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved", 2), ("zb1p", 1), ("gpipe", 1)])
def test_no_fill_holds_less_than_the_least(schedule: str, v: int) -> None:
    table, costs = case(schedule, 4, v, 8)
    sizes = default_sizes(costs)
    least = vision_fill._least_peak(table, sizes)
    assert least >= 0.75
    for found in (filled(table, costs), fill(table, costs), vision_fill.phase(table, costs)):
        assert found is not None and max(vision_peaks(found, sizes)) >= least


def test_a_large_table_is_refused_at_once_where_no_fill_can_keep_the_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, costs = case("1f1b", 4, 1, 16)
    monkeypatch.setattr(vision_fill, "EFFORT", 1)
    monkeypatch.setattr(vision_fill, "Network", None)
    with pytest.raises(vision_fill.CapError, match=r"cap=0.75: some rank has to hold 1;"):
        fill(table, costs, cap=0.75)

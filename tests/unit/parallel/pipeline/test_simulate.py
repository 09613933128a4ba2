"""Closed formulas of pipeline schedules, exactly. Letters: p ranks, v chunks of a rank, m micro-batches;
F, B, W forward, whole backward and its weight part of one chunk, b = B - W."""

from fractions import Fraction

import pytest

from parallel.pipeline.build import build
from parallel.pipeline.messages import walk
from parallel.pipeline.simulate import Costs, DeadlockError, peak_held, simulate, uniform
from parallel.pipeline.table import Layout, Op, Table

THIRD, SEVENTH = Fraction(1, 3), Fraction(1, 7)
RATIOS = [(1, 2), (THIRD, SEVENTH), (3, 2)]
SPLIT = [(1, 1, 1), (4, 5, 4), (2, 3, 1), (5, 4, 4), (1, 3, 1), (1, THIRD, THIRD), (THIRD, SEVENTH, SEVENTH)]
PIPELINES = [1, 2, 3, 4, 8]


def ones(p: int, v: int) -> list[int]:
    return [1] * (p * v)


@pytest.mark.parametrize("p", PIPELINES)
@pytest.mark.parametrize(("forward", "backward"), RATIOS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_chunk_is_idle_for_p_minus_one_micro_batches(
    schedule: str, forward: Fraction, backward: Fraction, p: int
) -> None:
    for m in (1, 2, p, 2 * p + 1, 4 * p):
        table = build(schedule, p, 1, m)
        timeline = simulate(table, uniform(table.layout, forward, backward))
        assert {timeline.idle(rank) for rank in range(p)} == {(p - 1) * (forward + backward)}
        assert timeline.bubble_over_compute == pytest.approx((p - 1) / m)
        assert timeline.peak_held(0, ones(p, 1)) == (m if schedule == "gpipe" else min(p, m))


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", PIPELINES)
@pytest.mark.parametrize(("forward", "backward"), RATIOS)
def test_interleaving_divides_the_bubble_for_any_number_of_micro_batches(
    forward: Fraction, backward: Fraction, p: int, v: int
) -> None:
    for m in range(1, 3 * p + 2):
        table = build("interleaved", p, v, m)
        timeline = simulate(table, uniform(table.layout, forward, backward))
        too_few = (v - 1) * max(0, p - m)
        assert {timeline.idle(rank) for rank in range(p)} == {(p - 1 + too_few) * (forward + backward)}


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", PIPELINES)
def test_interleaved_peak_in_chunks(p: int, v: int) -> None:
    for m in (1, p, 2 * p, 4 * p):
        table = build("interleaved", p, v, m)
        timeline = simulate(table, uniform(table.layout))
        expected = min(2 * (p - 1) + (v - 1) * p + 1, m * v)
        assert timeline.peak_held(0, ones(p, v)) == expected
        assert max(timeline.peak_held(rank, ones(p, v)) for rank in range(p)) == expected


@pytest.mark.parametrize(("m", "peak"), [(23, 27), (31, 26), (32, 23)])
def test_a_remainder_costs_few_activations(m: int, peak: int) -> None:
    assert peak_held(build("interleaved", 8, 2, m), 0, [(1,)] * 16) == [peak]


@pytest.mark.parametrize("p", PIPELINES)
@pytest.mark.parametrize(("forward", "inner", "weight"), SPLIT)
def test_zero_bubble_spans(forward: Fraction, inner: Fraction, weight: Fraction, p: int) -> None:
    spans = {
        "zb1p": (p - 1) * (forward + inner - weight),
        "zbh2": max(0, (p - 1) * (forward + inner - 2 * weight)),
        # Zero with three equal parts; otherwise it pays for the longest of them twice a rank.
        "zbv": 2 * (p - 1) * (max(forward, inner) - weight),
    }
    peaks = {"zb1p": p, "zbh2": 2 * p - 1, "zbv": 2 * p}
    for schedule, expected in spans.items():
        v = 2 if schedule == "zbv" else 1
        for m in (max(2 * p - 1, v), 3 * p + 1):
            table = build(schedule, p, v, m)
            timeline = simulate(table, uniform(table.layout, forward, inner + weight, weight))
            assert max(timeline.span_idle(rank) for rank in range(p)) == expected, (schedule, m)
            assert {timeline.peak_held(rank, ones(p, v)) for rank in range(p)} == {peaks[schedule]}


@pytest.mark.parametrize("p", PIPELINES)
def test_zero_bubble_steps_are_still_longer_than_their_work(p: int) -> None:
    for schedule, v in (("zb1p", 1), ("zbh2", 1), ("zbv", 2)):
        table = build(schedule, p, v, 3 * p)
        timeline = simulate(table, uniform(table.layout, 5, 10, 5))
        assert {timeline.idle(rank) for rank in range(p)} == {(p - 1) * 5}


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 3, 12), (8, 2, 32)])
def test_where_the_interleaved_bubble_lies(p: int, v: int, m: int) -> None:
    forward, backward = 1, 2
    table = build("interleaved", p, v, m)
    timeline = simulate(table, uniform(table.layout, forward, backward))
    for rank, ops in enumerate(table.ranks):
        starts, ends = timeline.starts[rank], timeline.ends[rank]
        first = next(index for index, op in enumerate(ops) if op.kind == "B")
        gaps = [start - end for start, end in zip(starts[1:], ends, strict=False)]
        assert starts[0] == rank * forward
        assert sum(gaps[:first]) == (p - 1 - rank) * forward
        assert sum(gaps[first:]) == (p - 1 - rank) * backward
        assert timeline.makespan - ends[-1] == rank * backward


def test_worked_bubbles_of_thirty_two_micro_batches_on_eight_ranks() -> None:
    found = {}
    for schedule, v in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb1p", 1)):
        table = build(schedule, 8, v, 32)
        costs = uniform(table.layout, Fraction(1), Fraction(2), Fraction(1))
        found[schedule, v] = simulate(table, costs).bubble_over_compute
    assert found == {
        ("1f1b", 1): Fraction(7, 32),
        ("interleaved", 2): Fraction(7, 64),
        ("interleaved", 4): Fraction(7, 128),
        ("zb1p", 1): Fraction(7, 96),
    }


@pytest.mark.parametrize(("hop", "idle"), [(0, 210), (1, 278), (Fraction(5, 2), 380), (5, 550)])
def test_latency_of_messages_slows_1f1b(hop: Fraction, idle: int) -> None:
    # In tenths of a forward.
    table = build("1f1b", 8, 1, 32)
    timeline = simulate(table, uniform(table.layout, 10, 20, hop=hop))
    assert timeline.idle(0) == idle


def test_one_rank_has_no_bubble_and_no_messages() -> None:
    table = build("1f1b", 1, 1, 7)
    timeline = simulate(table, Costs([0.1], [0.7], hop=100))
    assert timeline.makespan == pytest.approx(7 * 0.8) and timeline.bubble_over_compute == 0


def test_a_slow_stage_sets_the_pace() -> None:
    # The second stage works without a pause once it has started.
    timeline = simulate(build("1f1b", 2, 1, 3), Costs([1, 10], [2, 20]))
    assert timeline.makespan == 1 + 3 * 30 + 2
    assert timeline.busy(0) == 9 and timeline.span_idle(1) == 0


def test_vision_and_reductions_take_part() -> None:
    # Rank 1 encodes for rank 0, which sends the gradient back: one hop each way.
    ranks = (
        (Op("F", 0, 0), Op("B", 0, 0), Op("R", 0, 0)),
        (Op("VF", 0, 0), Op("F", 0, 0), Op("B", 0, 0), Op("VB", 0, 0)),
    )
    table = Table(Layout(2, 1, 1), ranks, parts=(1,))
    costs = Costs([1, 1], [2, 2], vision_forward=[[5]], vision_backward=[[7]], hop=Fraction(1, 2), reduce=3)
    timeline = simulate(table, costs)
    assert timeline.starts[0] == (5.5, 10.5, 12.5)
    assert timeline.starts[1] == (0, 7, 8, 13)
    assert timeline.makespan == 20


def test_kinds_are_reported_at_the_moment_of_the_largest_sum() -> None:
    # 1F1B on rank 0 of 2 holds two micro-batches of stage 0.
    table = build("1f1b", 2, 1, 4)
    assert peak_held(table, 0, [(1, 10), (5, 5)]) == [2, 20]
    assert peak_held(table, 1, [(1, 10), (5, 5)]) == [5, 5]


def test_released_activations_are_not_held() -> None:
    ops = [("F", 0), ("X", 0), ("F", 1), ("B", 1), ("P", 0), ("B", 0)]
    table = Table(Layout(1, 1, 2), (tuple(Op(kind, 0, microbatch) for kind, microbatch in ops),))
    assert peak_held(table, 0, [(3,)]) == [3]


def test_a_deadlock_names_the_head_of_each_rank() -> None:
    good = build("1f1b", 2, 1, 2)
    first, second = good.ranks
    swapped = Table(good.layout, (first, (second[2], second[3], second[0], second[1])))
    blocked = Table(good.layout, ((first[2], *first[:2], first[3]), second))
    assert simulate(swapped, uniform(good.layout)).makespan > simulate(good, uniform(good.layout)).makespan
    with pytest.raises(DeadlockError, match=r"rank 0 at B\(0,0\) waits for F\(0,0\) of rank 0; rank 1 at F"):
        simulate(blocked, uniform(good.layout))


def test_the_walk_meets_every_operation_after_what_it_needs() -> None:
    table = build("zbv", 4, 2, 9)
    met: set[tuple[int, Op]] = set()
    for rank, index, needed in walk(table):
        assert met.issuperset(needed)
        met.add((rank, table.ranks[rank][index]))
    assert len(met) == sum(map(len, table.ranks)) == 4 * 2 * 9 * 3

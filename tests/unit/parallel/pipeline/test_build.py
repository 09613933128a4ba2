"""Orders of the schedules. Letters: p ranks, v chunks of a rank, m micro-batches, g of them in a group."""

from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from parallel.pipeline.build import (
    Candidate,
    ScheduleError,
    best_group,
    build,
    cut,
    with_activation_moves,
    with_reductions,
)
from parallel.pipeline.check import check
from parallel.pipeline.simulate import uniform
from parallel.pipeline.table import TOWER, Layout, Op, Table


def spelled(ops: tuple[Op, ...]) -> str:
    return " ".join(f"{op.kind}{op.chunk}.{op.microbatch}" for op in ops)


def megatron_order(rank: int, p: int, v: int, m: int, g: int) -> list[Op]:
    """From megatron-core's own schedule table and number of warm-up forwards."""
    group = SimpleNamespace(size=lambda: p, rank=lambda: rank)
    communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=v if v > 1 else None)
    total, _, warm, remaining = get_pp_rank_microbatches(m, v, g, p2p_communicator=communicator)
    table = get_schedule_table(m, v, g)
    forward = [Op("F", chunk, microbatch) for microbatch, chunk in table]
    backward = [Op("B", v - 1 - chunk, microbatch) for microbatch, chunk in table]
    steady = [op for turn in range(remaining) for op in (forward[warm + turn], backward[turn])]
    return forward[:warm] + steady + backward[remaining:total]


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_order_is_that_of_megatron(p: int, v: int) -> None:
    cases = 0
    for m in range(1, 4 * p + 1):
        for g in {p, p + 1, 2 * p}:
            if v > 1 and (m < g or 0 < m % g < p):
                continue  # megatron-core refuses a small rest, and holds more than it has for a small m
            table = build("interleaved", p, v, m, g) if v > 1 else build("1f1b", p, 1, m)
            for rank in range(p):
                assert list(table.ranks[rank]) == megatron_order(rank, p, v, m, g), (m, g, rank)
            cases += 1
    assert cases >= 10


@pytest.mark.parametrize("p", [2, 3, 4])
def test_v_schedule_has_the_forwards_and_backwards_of_torch(p: int) -> None:
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "B", "FULL_BACKWARD": "B"}
    for m in (1, p, 2 * p - 1, 3 * p + 1):
        table = build("zbv", p, 2, m)
        theirs = object.__new__(ScheduleZBVZeroBubble)
        theirs.pp_group_size, theirs._n_microbatches, theirs.num_stages = p, m, 2 * p
        theirs.n_local_stages = 2
        for rank in range(p):
            expected = [
                (letters[action.computation_type.name], action.stage_index, action.microbatch_index)
                for action in theirs._calculate_single_rank_operations(rank)
                if action is not None and action.computation_type.name in letters
            ]
            ours = [
                (op.kind, table.layout.stage(rank, op.chunk), op.microbatch)
                for op in table.ranks[rank]
                if op.kind != "W"
            ]
            assert ours == [entry for entry in expected if entry[2] < m], (m, rank)


def test_orders_by_hand() -> None:
    def order(schedule: str, rank: int, v: int, m: int) -> str:
        return spelled(build(schedule, 2, v, m).ranks[rank])

    assert order("gpipe", 0, 1, 2) == "F0.0 F0.1 B0.0 B0.1"
    assert order("1f1b", 0, 1, 3) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert order("1f1b", 1, 1, 3) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"
    assert order("interleaved", 1, 2, 2) == "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1"
    assert order("zb1p", 0, 1, 3) == "F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2"
    assert order("zb1p", 1, 1, 3) == "F0.0 B0.0 F0.1 B0.1 W0.0 F0.2 B0.2 W0.1 W0.2"
    assert order("zbh2", 0, 1, 3) == "F0.0 F0.1 F0.2 B0.0 W0.0 B0.1 W0.1 B0.2 W0.2"
    assert order("zbv", 1, 2, 1) == "F0.0 F1.0 B1.0 W1.0 B0.0 W0.0"


@pytest.mark.parametrize(
    ("m", "g", "p", "sizes"),
    [
        (8, 4, 4, [4, 4]),
        (10, 6, 4, [6, 4]),
        (9, 4, 4, [5, 4]),
        (11, 4, 4, [6, 5]),
        (31, 8, 8, [11, 10, 10]),
        (3, 4, 4, [3]),
        (5, 8, 4, [5]),
    ],
)
def test_groups_of_micro_batches(m: int, g: int, p: int, sizes: list[int]) -> None:
    assert cut(m, g, p) == sizes


def test_larger_groups_hide_latency_for_memory() -> None:
    costs = uniform(Layout(8, 2, 32), 10, 20, hop=1)
    ranked = best_group(8, 2, 32, costs)
    assert ranked == [
        Candidate(9, 960 * 2 + 224, 26),
        Candidate(13, 960 * 2 + 224, 31),
        Candidate(12, 960 * 2 + 232, 27),
        Candidate(8, 960 * 2 + 240, 23),
    ]
    still = best_group(8, 2, 32, uniform(Layout(8, 2, 32), 10, 20))
    assert still[0] == Candidate(8, 960 * 2 + 210, 23)


def test_reductions_follow_the_last_backward() -> None:
    split = with_reductions(build("zb1p", 2, 1, 2))
    assert spelled(split.ranks[1]) == "F0.0 B0.0 F0.1 B0.1 W0.0 W0.1 R0.1"
    whole = with_reductions(build("interleaved", 2, 2, 2))
    assert spelled(whole.ranks[1]) == "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 R1.1 B0.0 B0.1 R0.1"


def test_a_burst_ends_where_the_rank_turns_to_another_chunk() -> None:
    table = with_reductions(build("interleaved", 2, 2, 4), bursts=True)
    assert spelled(table.ranks[1]) == (
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 R1.1 F0.2 B0.0 F0.3 B0.1 R0.1 F1.2 B1.2 F1.3 B1.3 R1.3 B0.2 B0.3 R0.3"
    )
    assert table.sums[1, 0] == (1, 3)
    check(table, buffers=1)
    one = with_reductions(build("1f1b", 1, 1, 3), bursts=True, most=2)
    assert spelled(one.ranks[0]) == "F0.0 B0.0 F0.1 B0.1 R0.1 F0.2 B0.2 R0.2"
    split = with_reductions(build("zbv", 2, 2, 3), bursts=True)
    check(split, buffers=1)


def test_every_rank_takes_part_in_the_reduction_of_the_tower() -> None:
    language = build("1f1b", 2, 1, 1).ranks
    ranks = ((Op("VF", 0, 0), *language[0], Op("VB", 0, 0)), language[1])
    table = with_reductions(Table(Layout(2, 1, 1), ranks, parts=(1,)))
    assert spelled(table.ranks[0]) == f"VF0.0 F0.0 B0.0 R0.0 VB0.0 R{TOWER}.0"
    assert spelled(table.ranks[1]) == f"F0.0 B0.0 R0.0 R{TOWER}.0"


def test_activations_move_only_over_a_distance() -> None:
    table = build("gpipe", 1, 1, 3)
    assert spelled(table.ranks[0]) == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"
    assert with_activation_moves(table, 2).ranks == table.ranks
    moved = with_activation_moves(table, 1)
    assert spelled(moved.ranks[0]) == ("F0.0 X0.0 F0.1 X0.1 P0.0 F0.2 X0.2 P0.1 B0.0 P0.2 B0.1 B0.2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 1, 4), "schedule is '1f2b'; choose one of gpipe, 1f1b"),
        (("1f1b", 2, 2, 4), "virtual is 2; the schedule 1f1b takes 1"),
        (("interleaved", 2, 1, 4), "virtual is 1; the schedule interleaved takes 2 or more"),
        (("zbv", 2, 3, 4), "virtual is 3; the schedule zbv takes 2"),
        (("1f1b", 0, 1, 4), "pipeline is 0; it must be at least 1"),
        (("1f1b", 2, 1, 4, 2), "group is 2; only the interleaved schedule has groups"),
        (("interleaved", 4, 2, 8, 3), "group is 3; it must be at least the pipeline size 4"),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(*arguments)

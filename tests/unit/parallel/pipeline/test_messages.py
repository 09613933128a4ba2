"""Messages of operations and programs of ranks. Letters: p ranks, v chunks of a rank, m micro-batches."""

import pytest

from parallel.pipeline.build import build
from parallel.pipeline.messages import Message, Step, consumes, depends, produces, programs
from parallel.pipeline.simulate import Costs, simulate, uniform
from parallel.pipeline.table import Layout, Op, Table

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb1p", 1), ("zbv", 2)]


def vision_table() -> Table:
    """Micro-batch 0 has a part on each rank, micro-batch 1 none."""
    first, second = build("1f1b", 2, 1, 2).ranks
    ranks = (
        (Op("VF", 0, 0), *first, Op("VB", 0, 0)),
        (Op("VF", 1, 0), *second, Op("VB", 1, 0)),
    )
    return Table(Layout(2, 1, 2), ranks, parts=(2, 0))


def test_neighbours_exchange_activations_and_gradients() -> None:
    table = build("interleaved", 2, 2, 2)
    assert produces(table, 1, Op("F", 0, 1)) == (Message("activation", 1, 0, 2, 1),)
    assert consumes(table, 0, Op("F", 1, 1)) == (Message("activation", 1, 0, 2, 1),)
    assert produces(table, 0, Op("B", 1, 0)) == (Message("gradient", 0, 1, 1, 0),)
    assert consumes(table, 1, Op("B", 0, 0)) == (Message("gradient", 0, 1, 1, 0),)
    ends = [consumes(table, 0, Op("F", 0, 0)), produces(table, 1, Op("F", 1, 0))]
    ends += [consumes(table, 1, Op("B", 1, 0)), produces(table, 0, Op("B", 0, 0))]
    assert ends == [()] * 4


def test_the_turn_of_a_v_stays_on_its_rank() -> None:
    table = build("zbv", 2, 2, 1)
    assert produces(table, 1, Op("F", 0, 0)) == consumes(table, 1, Op("F", 1, 0)) == ()
    assert depends(table, 1, Op("F", 1, 0)) == ((1, Op("F", 0, 0)),)
    assert produces(table, 1, Op("F", 1, 0)) == (Message("activation", 1, 0, 3, 0),)
    assert produces(table, 0, Op("W", 1, 0)) == consumes(table, 0, Op("W", 1, 0)) == ()


def test_embeddings_come_from_other_ranks_only() -> None:
    table = vision_table()
    embedding = (Message("embedding", 1, 0, 1, 0),)
    assert consumes(table, 0, Op("F", 0, 0)) == produces(table, 1, Op("VF", 1, 0)) == embedding
    assert consumes(table, 0, Op("F", 0, 1)) == produces(table, 0, Op("VF", 0, 0)) == ()
    gradient = (Message("embedding_gradient", 0, 1, 1, 0),)
    assert produces(table, 0, Op("B", 0, 0)) == consumes(table, 1, Op("VB", 1, 0)) == gradient
    assert consumes(table, 0, Op("VB", 0, 0)) == ()


def test_what_an_operation_waits_for() -> None:
    table = vision_table()
    assert depends(table, 0, Op("F", 0, 0)) == ((0, Op("VF", 0, 0)), (1, Op("VF", 1, 0)))
    assert depends(table, 0, Op("F", 0, 1)) == ()
    assert depends(table, 0, Op("B", 0, 1)) == ((0, Op("F", 0, 1)), (1, Op("B", 0, 1)))
    assert depends(table, 1, Op("B", 0, 1)) == ((1, Op("F", 0, 1)),)
    assert depends(table, 1, Op("VB", 1, 0)) == ((1, Op("VF", 1, 0)), (0, Op("B", 0, 0)))
    assert depends(table, 1, Op("W", 0, 1)) == ((1, Op("B", 0, 1)),)
    assert depends(table, 1, Op("R", 0, 1)) == ((1, Op("B", 0, 0)), (1, Op("B", 0, 1)))
    assert depends(table, 1, Op("R", -1, 0)) == ((1, Op("VB", 1, 0)),)
    assert depends(table, 0, Op("P", 0, 1)) == ((0, Op("X", 0, 1)),)
    assert depends(table, 0, Op("X", 0, 1)) == ((0, Op("F", 0, 1)),)


def test_a_program_by_hand() -> None:
    table = build("1f1b", 2, 1, 2)
    [first, second] = programs(table, simulate(table, uniform(table.layout)))
    up = [Message("activation", 0, 1, 1, microbatch) for microbatch in (0, 1)]
    down = [Message("gradient", 1, 0, 0, microbatch) for microbatch in (0, 1)]
    assert first == [
        Step("run", Op("F", 0, 0)),
        Step("send", up[0]),
        Step("run", Op("F", 0, 1)),
        Step("send", up[1]),
        Step("recv", down[0]),
        Step("recv", down[1]),
        Step("wait", down[0]),
        Step("run", Op("B", 0, 0)),
        Step("wait", down[1]),
        Step("run", Op("B", 0, 1)),
    ]
    assert [step.action for step in second][:3] == ["recv", "wait", "run"]
    assert [step.item for step in second if step.action == "send"] == down


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(("schedule", "v"), SCHEDULES)
def test_programs_carry_every_message_once_and_in_one_order(schedule: str, v: int, ahead: int) -> None:
    table = build(schedule, 4, v, 9)
    made = programs(table, simulate(table, uniform(table.layout)), ahead)
    orders = []
    for rank, program in enumerate(made):
        assert [step.item for step in program if step.action == "run"] == list(table.ranks[rank])
        for action, of in (("send", produces), ("recv", consumes), ("wait", consumes)):
            posted = [step.item for step in program if step.action == action]
            assert sorted(posted) == sorted(m for op in table.ranks[rank] for m in of(table, rank, op))
        orders.append([step.item for step in program if step.action in ("send", "recv")])
        waited = [step.item for step in program if step.action in ("recv", "wait")]
        assert all(waited.index(item) < len(waited) - 1 - waited[::-1].index(item) for item in waited)
    for near in orders:
        for far in orders:
            both = set(near) & set(far)
            assert [m for m in near if m in both] == [m for m in far if m in both]


def test_a_send_follows_its_producer_and_a_receive_comes_ahead() -> None:
    table = build("interleaved", 4, 2, 8)
    made = programs(table, simulate(table, uniform(table.layout)))
    for rank, program in enumerate(made):
        open_receives = most = 0
        for index, (action, item) in enumerate(program):
            if action == "send":
                runs = [step.item for step in program[:index] if step.action == "run"]
                assert item in produces(table, rank, runs[-1])
            open_receives += {"recv": 1, "wait": -1}.get(action, 0)
            most = max(most, open_receives)
        assert 1 <= most <= 4


def test_operations_without_cost_keep_a_valid_order() -> None:
    table = build("interleaved", 3, 2, 5)
    timeline = simulate(table, Costs([0] * 6, [0] * 6))
    assert timeline.makespan == 0
    for program in programs(table, timeline):
        # A receive never stands behind its use, whatever the numbering of equal times.
        met: set[Message] = set()
        for action, item in program:
            if action == "recv":
                met.add(item)
            assert action != "wait" or item in met

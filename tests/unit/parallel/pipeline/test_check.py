"""Valid tables pass and broken ones do not. Letters: p ranks, v chunks of a rank, m micro-batches."""

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pipeline.build import SCHEDULES, build, with_activation_moves, with_reductions
from parallel.pipeline.check import DISCIPLINES, TableError, check, check_programs
from parallel.pipeline.messages import Message, Step, consumes, depends, produces, programs
from parallel.pipeline.rows import RowPlan
from parallel.pipeline.simulate import Costs, simulate
from parallel.pipeline.table import Layout, Op, Table


@st.composite
def built(draw: st.DrawFn) -> Table:
    """A table of any schedule, perhaps with vision, reductions and moves."""
    schedule = draw(st.sampled_from(SCHEDULES))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    v = {"interleaved": draw(st.integers(2, 3)), "zbv": 2}.get(schedule, 1)
    group = draw(st.integers(p, 2 * p)) if schedule == "interleaved" else None
    table = build(schedule, p, v, m, group)
    if draw(st.booleans()):
        table = with_vision(table, draw(st.lists(st.integers(0, 3), min_size=m, max_size=m)))
    if draw(st.booleans()):
        table = with_activation_moves(table, draw(st.integers(0, 4)))
    return with_reductions(table) if draw(st.booleans()) else table


def with_vision(table: Table, parts: list[int]) -> Table:
    """Part i of each micro-batch on rank i modulo p: all forwards first, all backwards last."""
    p = table.layout.pipeline
    ranks = []
    for rank, ops in enumerate(table.ranks):
        own = [(part, k) for k, count in enumerate(parts) for part in range(count) if part % p == rank]
        forward, backward = ([Op(kind, *place) for place in own] for kind in ("VF", "VB"))
        ranks.append((*forward, *ops, *backward))
    return replace(table, ranks=tuple(ranks), parts=tuple(parts))


def random_costs(table: Table, random: Random) -> Costs:
    def draw() -> Fraction:
        return Fraction(random.randint(0, 12), random.randint(1, 5))

    stages = range(table.layout.stages)
    weight = [draw() for _ in stages]
    return Costs(
        forward=[draw() for _ in stages],
        backward=[part + draw() for part in weight],
        weight=weight,
        vision_forward=[[draw() for _ in range(count)] for count in table.parts],
        vision_backward=[[draw() for _ in range(count)] for count in table.parts],
        hop=draw(),
        reduce=draw(),
    )


def mutated(table: Table, rank: int, ops: tuple[Op, ...] | list[Op]) -> Table:
    ranks = list(table.ranks)
    ranks[rank] = tuple(ops)
    return replace(table, ranks=tuple(ranks))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(built(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_built_tables_pass_and_their_programs_end_under_any_costs(
    table: Table, random: Random, ahead: int
) -> None:
    rows = RowPlan(table.layout, tuple(sorted(random.choices(range(table.layout.stages), k=5))))
    check(table, rows=rows)
    check(table, rows=replace(rows, cache=False))
    timeline = simulate(table, random_costs(table, random))
    check_programs(programs(table, timeline, ahead))
    for rank, ops in enumerate(table.ranks):
        for before, after in zip(timeline.ends[rank], timeline.starts[rank][1:], strict=False):
            assert before <= after
        assert len(timeline.starts[rank]) == len(ops)
        assert timeline.busy(rank) + timeline.idle(rank) == timeline.makespan


@settings(max_examples=100, deadline=None, derandomize=True)
@given(built(), st.randoms(use_true_random=False))
def test_lost_and_doubled_operations_are_found(table: Table, random: Random) -> None:
    rank = random.choice([rank for rank, ops in enumerate(table.ranks) if ops])
    ops = table.ranks[rank]
    index = random.randrange(len(ops))
    with pytest.raises(TableError):
        check(mutated(table, rank, ops[:index] + ops[index + 1 :]))
    twice = list(ops)
    twice.insert(random.randint(0, len(ops)), ops[index])
    with pytest.raises(TableError):
        check(mutated(table, rank, twice))


def ends(table: Table) -> bool:
    """Whether a table runs to its end: an independent fixed point over all ranks."""
    done: set[tuple[int, Op]] = set()
    position = [0] * len(table.ranks)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(table.ranks):
            if position[rank] < len(ops) and done.issuperset(depends(table, rank, ops[position[rank]])):
                done.add((rank, ops[position[rank]]))
                position[rank] += 1
                moved = True
    late = {
        (rank, op)
        for rank, ops in enumerate(table.ranks)
        for op in ops
        if op.kind == "P" and ops.index(op) > ops.index(Op("B", *op[1:]))
    }
    return not late and all(at == len(ops) for at, ops in zip(position, table.ranks, strict=True))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(built(), st.randoms(use_true_random=False))
def test_a_swap_passes_exactly_if_the_table_still_runs(table: Table, random: Random) -> None:
    rank = random.choice([rank for rank, ops in enumerate(table.ranks) if ops])
    ops = list(table.ranks[rank])
    near = random.randrange(len(ops))
    far = min(len(ops) - 1, near + random.randint(1, 6))
    ops[near], ops[far] = ops[far], ops[near]
    swapped = mutated(table, rank, ops)
    if ends(swapped):
        check(swapped)
    else:
        with pytest.raises(TableError):
            check(swapped)


TWO = build("1f1b", 2, 1, 2)
SEEING = with_vision(TWO, [1, 2])


def moved(ops: tuple[Op, ...], op: Op, index: int) -> list[Op]:
    rest = [other for other in ops if other != op]
    return [*rest[:index], op, *rest[index:]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (mutated(TWO, 0, TWO.ranks[0][1:]), r"rank 0, F\(0,0\): is missing"),
        (mutated(TWO, 1, (*TWO.ranks[1], Op("F", 0, 1))), r"rank 1, F\(0,1\): stands 2 times"),
        (mutated(TWO, 1, (*TWO.ranks[1], Op("F", 1, 1))), r"rank 1, F\(1,1\): no such operation"),
        (mutated(TWO, 1, (*TWO.ranks[1], Op("W", 0, 1))), r"rank 1, W\(0,1\): no such operation"),
        (mutated(TWO, 1, (*TWO.ranks[1], Op("Z", 0, 1))), r"rank 1, Z\(0,1\): no such operation"),
        (replace(TWO, ranks=TWO.ranks[:1]), "the table has 1 ranks; its layout has 2"),
        (mutated(TWO, 1, moved(TWO.ranks[1], Op("B", 0, 0), 0)), r"rank 1, B\(0,0\): comes before F\(0,0\)"),
        (mutated(TWO, 0, (*TWO.ranks[0], Op("R", 0, 1))), r"rank 1, R\(0,1\): is missing"),
        (
            mutated(with_reductions(TWO), 0, moved(with_reductions(TWO).ranks[0], Op("R", 0, 1), 2)),
            r"rank 0, R\(0,1\): comes before B\(0,0\)",
        ),
        (mutated(TWO, 0, (*TWO.ranks[0], Op("P", 0, 0))), r"rank 0, P\(0,0\): .* never released"),
        (
            mutated(TWO, 0, (TWO.ranks[0][0], Op("X", 0, 0), *TWO.ranks[0][1:])),
            r"rank 0, X\(0,0\): is released and never prefetched",
        ),
        (
            mutated(TWO, 0, (TWO.ranks[0][0], Op("X", 0, 0), *TWO.ranks[0][1:], Op("P", 0, 0))),
            r"rank 0, P\(0,0\): comes after the backward",
        ),
        (
            mutated(TWO, 0, (Op("X", 0, 0), TWO.ranks[0][0], Op("P", 0, 0), *TWO.ranks[0][1:])),
            r"rank 0, X\(0,0\): comes before F\(0,0\)",
        ),
        (replace(SEEING, parts=(1, 3)), r"VF\(2,1\): is missing on every rank"),
        (replace(SEEING, parts=(1,)), "parts has 1 entries; the layout has 2"),
        (replace(SEEING, parts=(1, 1)), r"rank 1, VF\(1,1\): no such part"),
        (mutated(SEEING, 1, (Op("VF", 0, 0), *SEEING.ranks[1])), r"rank 1, VF\(0,0\): stands 2 times"),
        (
            mutated(SEEING, 0, moved(SEEING.ranks[0], Op("VF", 0, 0), 3)),
            r"rank 0, F\(0,0\): comes before VF\(0,0\)",
        ),
        (
            mutated(SEEING, 1, moved(SEEING.ranks[1], Op("VF", 1, 1), 3)),
            r"wait for each other in a circle: rank 0 at F\(0,1\) waits for VF\(1,1\) of rank 1",
        ),
        (
            mutated(SEEING, 1, moved(SEEING.ranks[1], Op("VB", 1, 1), 2)),
            r"rank 0 at B\(0,0\) waits for B\(0,0\) of rank 1; rank 1 at VB\(1,1\) waits for B\(0,1\)",
        ),
    ],
)
def test_each_rule_has_its_message(table: Table, message: str) -> None:
    with pytest.raises(TableError, match=message):
        check(table)


def test_sums_of_bursts_are_proven() -> None:
    table = with_reductions(build("interleaved", 2, 3, 4), bursts=True)
    check(table, buffers=1)
    late = moved(table.ranks[0], Op("R", 2, 1), table.ranks[0].index(Op("B", 1, 0)))
    check(mutated(table, 0, late), buffers=2)
    with pytest.raises(TableError, match=r"rank 0, B\(1,0\): 2 chunks hold gradients, there are 1 buffers"):
        check(mutated(table, 0, late), buffers=1)
    joined = moved(table.ranks[0], Op("R", 2, 1), table.ranks[0].index(Op("B", 2, 2)))
    with pytest.raises(TableError, match=r"rank 0, B\(2,2\): comes before R\(2,1\), which is not to sum it"):
        check(mutated(table, 0, joined))
    lost = [op for op in table.ranks[0] if op != Op("R", 2, 3)]
    with pytest.raises(TableError, match=r"rank 0, R\(2,3\): is missing"):
        check(mutated(table, 0, lost))
    once = with_reductions(build("interleaved", 2, 3, 4))
    with pytest.raises(TableError, match=r"3 chunks hold gradients, there are 2 buffers"):
        check(once, buffers=2)


def test_both_passes_of_a_part_share_a_rank() -> None:
    first, second = SEEING.ranks
    gradient = Op("VB", 0, 0)
    ranks = (tuple(op for op in first if op != gradient), (*second, gradient))
    with pytest.raises(TableError, match=r"rank 1, VB\(0,0\): its forward ran on rank 0"):
        check(replace(SEEING, ranks=ranks))


def test_held_activations_are_bounded() -> None:
    table = build("zbh2", 4, 1, 8)
    check(table, limit=7)
    with pytest.raises(TableError, match=r"rank 0, F\(0,6\): 7 chunk activations are held, the limit is 6"):
        check(table, limit=6)
    one = build("1f1b", 4, 1, 8)
    check(one, limit=[4, 3, 2, 1])
    with pytest.raises(TableError, match=r"rank 2, F\(0,1\)"):
        check(one, limit=[4, 3, 1, 1])


def test_moved_activations_are_not_held() -> None:
    table = build("gpipe", 2, 1, 6)
    with pytest.raises(TableError):
        check(table, limit=4)
    check(with_activation_moves(table, 2), limit=4)


class Lossy(RowPlan):
    """Forgets that a stage needs row 0."""

    def arriving(self, stage: int) -> range:
        return range(1, self.known(stage)) if stage == 1 else super().arriving(stage)


class Repeating(RowPlan):
    """Sends the whole bank although ranks keep it."""

    def arriving(self, stage: int) -> range:
        return range(self.known(stage))


def test_rows_are_present_and_sent_once() -> None:
    table = build("interleaved", 3, 2, 3)
    made = tuple(range(6))
    check(table, rows=RowPlan(table.layout, made))
    with pytest.raises(TableError, match=r"rank 1, F\(0,0\): row 0 is read and not present"):
        check(table, rows=Lossy(table.layout, made))
    with pytest.raises(TableError, match=r"rank 0, F\(1,0\): row 0 is sent to the rank a second time"):
        check(table, rows=Repeating(table.layout, made))
    check(table, rows=Repeating(table.layout, made, cache=False))
    with pytest.raises(TableError, match="the rows are planned for"):
        check(table, rows=RowPlan(Layout(2, 3, 3), made))


def naive(table: Table) -> list[list[Step]]:
    """Each receive right before its use, whatever the other ranks do."""
    return [
        [
            step
            for op in ops
            for step in (
                *(Step(action, m) for m in consumes(table, rank, op) for action in ("recv", "wait")),
                Step("run", op),
                *(Step("send", m) for m in produces(table, rank, op)),
            )
        ]
        for rank, ops in enumerate(table.ranks)
    ]


def test_posting_without_a_common_order_fails() -> None:
    with pytest.raises(TableError, match="with one queue for each rank|queue for each unordered pair"):
        check_programs(naive(build("interleaved", 2, 2, 4)))
    check_programs(naive(build("gpipe", 2, 1, 3)))


def test_each_discipline_sees_its_own_fault() -> None:
    there, back = Message("activation", 0, 1, 1, 0), Message("gradient", 1, 0, 0, 0)
    crossing = [
        [Step("send", there), Step("recv", back), Step("wait", back)],
        [Step("send", back), Step("recv", there), Step("wait", there)],
    ]
    with pytest.raises(
        TableError, match=r"rank 1, gradient\(0,0\) .*meets activation\(1,0\) .* each unordered pair"
    ):
        check_programs(crossing)
    again = Message("activation", 0, 1, 1, 1)
    with pytest.raises(TableError, match="with one queue for each flow and pair"):
        check_programs(
            [
                [Step("send", there), Step("send", again)],
                [Step("recv", again), Step("recv", there), Step("wait", there), Step("wait", again)],
            ]
        )
    with pytest.raises(TableError, match=r"rank 1 waits for activation\(1,0\)"):
        check_programs([[], [Step("recv", there), Step("wait", there)]])
    with pytest.raises(TableError, match=r"rank 0 posts activation\(1,0\) from rank 0 to rank 1 alone"):
        check_programs([[Step("send", there)], []])
    assert len(DISCIPLINES) == 5

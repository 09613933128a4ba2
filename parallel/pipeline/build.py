"""Builds tables of the known schedules. Imports no torch.

One generator serves them all: some forwards, then backward and forward in turn, then the remaining backwards.
Letters: p pipeline ranks, v chunks of a rank, m micro-batches, r rank. Sources: 1F1B and its interleaved form
(arXiv:2104.04473, order of megatron-core), zero-bubble schedules H1, H2 (arXiv:2401.10241) and V
(arXiv:2405.15362).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from .simulate import Costs, simulate
from .table import (
    BACKWARD,
    FORWARD,
    PREFETCH,
    REDUCE,
    RELEASE,
    TOWER,
    VISION_BACKWARD,
    VISION_FORWARD,
    WEIGHT,
    Layout,
    Op,
    Table,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbh2", "zbv")
COMPUTE = (FORWARD, BACKWARD, WEIGHT, VISION_FORWARD, VISION_BACKWARD)


class ScheduleError(ValueError):
    """A schedule that does not exist for the asked layout; the message says what does."""


class Candidate(NamedTuple):
    """A group size of the interleaved schedule, its time, and the chunk activations on the fullest rank."""

    group: int
    makespan: float
    peak: int


def build(schedule: str, pipeline: int, virtual: int, microbatches: int, group: int | None = None) -> Table:
    """The table of a schedule, for any number of micro-batches.

    Args:
        schedule: one of `SCHEDULES`. zb1p, zbh2 and zbv split the backward.
        pipeline: p.
        virtual: v; interleaved takes 2 or more, zbv exactly 2 (its second chunks run back over the ranks),
            the others 1.
        microbatches: m.
        group: micro-batches that the interleaved schedule takes through a chunk before it turns to the next,
            at least p, which is the default. More hides the latency of messages for more held activations.

    Raises:
        ScheduleError: the schedule is unknown or does not take these sizes.
    """
    _validate(schedule, pipeline, virtual, microbatches, group)
    layout = Layout(pipeline, virtual, microbatches, vee=schedule == "zbv")
    sizes = cut(microbatches, group or pipeline, pipeline) if virtual > 1 else [microbatches]
    return Table(
        layout, tuple(tuple(_order(schedule, layout, rank, sizes)) for rank in range(pipeline)), schedule
    )


def cut(microbatches: int, group: int, pipeline: int) -> list[int]:
    """Sizes of the groups of micro-batches that pass a chunk in one go.

    As in megatron-core the last one is smaller where it still fills the pipeline. Where it would not, which
    megatron-core refuses, its micro-batches are spread over the other groups: that keeps the idle time of the
    even case, and the fewest activations.
    """
    full, rest = divmod(microbatches, group)
    if rest == 0 or rest >= pipeline:
        return [group] * full + [rest] * (rest > 0)
    full = max(full, 1)
    size, larger = divmod(microbatches, full)
    return [size + 1] * larger + [size] * (full - larger)


def merge(
    forward: Sequence[Op | None],
    backward: Sequence[Op],
    warm: int,
    lag: int | None = None,
    tail: int | None = None,
) -> list[Op]:
    """The order of one rank: `warm` forwards, backward and forward in turn, the remaining backwards.

    A forward slot may be empty (None). With `lag` and `tail` the backward is split, and each W comes so many
    backwards after its B: `lag` while forwards remain, `tail` afterwards.
    """
    order = list(forward[:warm])
    ahead = forward[warm:]
    pending: deque[Op] = deque()
    for turn, op in enumerate(backward):
        order.append(op)
        if lag is not None and tail is not None:
            pending.append(Op(WEIGHT, op.chunk, op.microbatch))
            while len(pending) > (lag if turn < len(ahead) else tail):
                order.append(pending.popleft())
        if turn < len(ahead):
            order.append(ahead[turn])
    return [op for op in (*order, *pending) if op is not None]


def usual(virtual: int) -> str:
    """The schedule that training runs with this many chunks on a rank."""
    return "1f1b" if virtual == 1 else "interleaved"


def forward_only(table: Table) -> Table:
    """The table's forwards alone, in its order: what an evaluation runs."""
    ranks = tuple(tuple(op for op in ops if op.kind in (FORWARD, VISION_FORWARD)) for ops in table.ranks)
    return replace(table, ranks=ranks)


def with_reductions(table: Table, *, bursts: bool = False, most: int | None = None) -> Table:
    """The table with a `REDUCE` of each chunk right after its last backward, and one of the tower.

    A rank sums the tower after its last VB, or at its end if it has none: every rank takes part in that sum.

    Args:
        bursts: sum whenever the rank turns to another chunk's backward, so that no two chunks of a rank
            accumulate at once: ZeRO-2 needs two buffers then, one that fills and one that is being summed.
        most: micro-batches after which a burst ends even if the same chunk goes on.
    """
    assert not _has(table, REDUCE), "the table has its reductions already"
    last = WEIGHT if table.splits_backward else BACKWARD

    def insert(rank: int, ops: tuple[Op, ...]) -> Iterator[Op]:
        own = [op for op in ops if op.kind == last]
        ends = set(_burst_ends(own, most) if bursts else {op.chunk: op for op in own}.values())
        tower = [op for op in ops if op.kind == VISION_BACKWARD]
        for op in ops:
            yield op
            if op in ends:
                yield Op(REDUCE, op.chunk, op.microbatch)
            if tower and op == tower[-1]:
                yield Op(REDUCE, TOWER, 0)
        if table.parts and not tower:
            yield Op(REDUCE, TOWER, 0)

    return _rewritten(table, insert)


def _burst_ends(backwards: list[Op], most: int | None) -> Iterator[Op]:
    """The last backward of each run of one chunk's, a run being cut after `most` of them."""
    length = 0
    for op, after in zip(backwards, [*backwards[1:], None], strict=True):
        length += 1
        if after is None or after.chunk != op.chunk or length == most:
            yield op
            length = 0


def with_activation_moves(table: Table, distance: int) -> Table:
    """The table with a `RELEASE` and a `PREFETCH` for what a forward saves for a distant backward.

    What has more than `distance` compute operations of its rank between its forward and its backward is
    released right after the forward and prefetched so that `distance` of them remain before the backward.
    """
    assert distance >= 0, distance
    assert not _has(table, RELEASE), "the table has its activation moves already"

    def insert(rank: int, ops: tuple[Op, ...]) -> Iterator[Op]:
        compute = [op for op in ops if op.kind in COMPUTE]
        at = {op: index for index, op in enumerate(compute)}
        fetched = defaultdict(list)
        released = set()
        for op, index in at.items():
            if op.kind == FORWARD:
                use = at[Op(BACKWARD, op.chunk, op.microbatch)]
                if use - index - 1 > distance:
                    released.add(op)
                    fetched[compute[use - distance]].append(Op(PREFETCH, op.chunk, op.microbatch))
        for op in ops:
            yield from fetched.get(op, ())
            yield op
            if op in released:
                yield Op(RELEASE, op.chunk, op.microbatch)

    return _rewritten(table, insert)


def best_group(pipeline: int, virtual: int, microbatches: int, costs: Costs) -> list[Candidate]:
    """Group sizes p to 2p of the interleaved schedule under `costs`, fastest first, then fewest activations.

    Groups beyond 2p hide no more latency. Sizes that cut the micro-batches alike are tried once. Each costs a
    simulation of the whole table.
    """
    tried: dict[tuple[int, ...], Candidate] = {}
    for group in range(pipeline, 2 * pipeline + 1):
        sizes = tuple(cut(microbatches, group, pipeline))
        if sizes not in tried:
            timeline = simulate(build("interleaved", pipeline, virtual, microbatches, group), costs)
            ones = [1] * (pipeline * virtual)
            peak = max(int(timeline.peak_held(rank, ones)) for rank in range(pipeline))
            tried[sizes] = Candidate(group, timeline.makespan, peak)
    return sorted(tried.values(), key=lambda candidate: (candidate.makespan, candidate.peak, candidate.group))


def _validate(schedule: str, pipeline: int, virtual: int, microbatches: int, group: int | None) -> None:
    if schedule not in SCHEDULES:
        raise ScheduleError(f"schedule is {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    sizes = {"pipeline": pipeline, "virtual": virtual, "microbatches": microbatches}
    for name, size in sizes.items():
        if size < 1:
            raise ScheduleError(f"{name} is {size}; it must be at least 1")
    chunks = {"interleaved": "2 or more", "zbv": "2"}.get(schedule, "1")
    fits = virtual >= 2 if schedule == "interleaved" else str(virtual) == chunks
    if not fits:
        raise ScheduleError(f"virtual is {virtual}; the schedule {schedule} takes {chunks}")
    if group is not None and schedule != "interleaved":
        raise ScheduleError(f"group is {group}; only the interleaved schedule has groups, leave it out")
    if group is not None and group < pipeline:
        raise ScheduleError(f"group is {group}; it must be at least the pipeline size {pipeline}")


def _order(schedule: str, layout: Layout, rank: int, sizes: list[int]) -> list[Op]:
    if schedule == "zbv":
        return _vee(layout.pipeline, rank, layout.microbatches)
    forward, backward = _queues(layout.virtual, sizes)
    behind = layout.pipeline - rank
    if schedule == "gpipe":
        return merge(forward, backward, len(forward))
    if schedule == "interleaved":
        return merge(forward, backward, 2 * (behind - 1) + (layout.virtual - 1) * max(sizes) + 1)
    if schedule == "zb1p":
        return merge(forward, backward, behind, rank, rank)
    if schedule == "zbh2":
        return merge(forward, backward, 2 * behind - 1, 2 * rank, 2 * rank)
    return merge(forward, backward, behind)


def _queues(virtual: int, sizes: list[int]) -> tuple[list[Op], list[Op]]:
    """Forwards and backwards group by group: in each the chunks in turn, backward the last chunk first."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    groups = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    forward, backward = (
        [Op(kind, chunk, microbatch) for group in groups for chunk in chunks for microbatch in group]
        for kind, chunks in ((FORWARD, range(virtual)), (BACKWARD, range(virtual - 1, -1, -1)))
    )
    return forward, backward


def _vee(pipeline: int, rank: int, microbatches: int) -> list[Op]:
    """ZBV is laid out for at least 2p - 1 micro-batches; surplus ones are dropped from the finished order."""
    n, q = max(microbatches, 2 * pipeline - 1), pipeline - rank
    first = 2 * q - 1
    forward = [0] * first + [1, 0] * rank + [1] * q + [0, 1] * (n - first - rank) + [None, 1] * (q - 1)
    backward = [1] * q + [0, 1] * (n - q) + [0] * q
    order = merge(
        list(_numbered(FORWARD, forward)),
        [op for op in _numbered(BACKWARD, backward) if op is not None],
        2 * pipeline,
        0,
        2 * rank,
    )
    return [op for op in order if op.microbatch < microbatches]


def _numbered(kind: str, chunks: Sequence[int | None]) -> Iterator[Op | None]:
    """Operations of the chunks, each chunk's micro-batches in turn."""
    microbatch = {0: count(), 1: count()}
    return (None if chunk is None else Op(kind, chunk, next(microbatch[chunk])) for chunk in chunks)


def _has(table: Table, kind: str) -> bool:
    return any(op.kind == kind for ops in table.ranks for op in ops)


def _rewritten(table: Table, insert: Callable[[int, tuple[Op, ...]], Iterator[Op]]) -> Table:
    return replace(table, ranks=tuple(tuple(insert(rank, ops)) for rank, ops in enumerate(table.ranks)))

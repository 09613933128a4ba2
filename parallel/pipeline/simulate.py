"""How long a table takes and what it holds, from what each operation costs. Imports no torch.

Times are of whatever type the costs are: with integers or fractions, which is how closed formulas are tested,
every result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .messages import DeadlockError, walk
from .table import (
    BACKWARD,
    FORWARD,
    PREFETCH,
    REDUCE,
    RELEASE,
    VISION_BACKWARD,
    VISION_FORWARD,
    WEIGHT,
    Layout,
    Op,
    Table,
)

__all__ = ["Costs", "DeadlockError", "Timeline", "durations", "peak_held", "recalled", "simulate", "uniform"]

RECALLED = 2
"""Timelines that are kept: without the tower and with it."""


@dataclass(frozen=True)
class Costs:
    """Time of each operation; all times in one unit, as int, Fraction or float.

    Attributes:
        forward: of one micro-batch through each stage.
        backward: its whole backward, by stage.
        weight: the part of `backward` that goes to W where the table splits it; () for none of it.
        vision_forward: by micro-batch and part of its images; () without vision.
        vision_backward: the same.
        hop: from the end of an operation to the arrival of its message at another rank.
        reduce: of a `REDUCE`.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float] = ()
    vision_forward: Sequence[Sequence[float]] = ()
    vision_backward: Sequence[Sequence[float]] = ()
    hop: float = 0
    reduce: float = 0


@dataclass(frozen=True)
class Timeline:
    """When each operation starts and ends: `starts[rank][i]` is that of `table.ranks[rank][i]`."""

    table: Table
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """From the start of the step to the end of the last operation of any rank."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    def busy(self, rank: int) -> float:
        """Time in which a rank works."""
        pairs = zip(self.starts[rank], self.ends[rank], strict=True)
        return sum(end - start for start, end in pairs)

    def idle(self, rank: int) -> float:
        """The rest of the makespan."""
        if not self.starts[rank]:
            return self.makespan
        return self.starts[rank][0] + self.span_idle(rank) + self.makespan - self.ends[rank][-1]

    def span_idle(self, rank: int) -> float:
        """Idle time between a rank's own first and last operation: what is lost if steps overlap."""
        return sum(start - end for start, end in zip(self.starts[rank][1:], self.ends[rank], strict=False))

    @property
    def bubble_over_compute(self) -> float:
        """Idle time of all ranks over their work; there must be some."""
        ranks = range(len(self.ends))
        return sum(map(self.idle, ranks)) / sum(map(self.busy, ranks))

    def peak_held(self, rank: int, sizes: Sequence[float]) -> float:
        """Most that a rank holds if a forward of stage s saves `sizes[s]`; see `peak_held` of the module."""
        return peak_held(self.table, rank, [(size,) for size in sizes])[0]


def uniform(
    layout: Layout,
    forward: float = 1,
    backward: float = 2,
    weight: float = 1,
    *,
    parts: Sequence[int] = (),
    vision_forward: float = 0,
    vision_backward: float = 0,
    hop: float = 0,
    reduce: float = 0,
) -> Costs:
    """Equal stages, and equal parts of images: `parts[k]` of them in micro-batch k. Times are of each."""
    return Costs(
        forward=(forward,) * layout.stages,
        backward=(backward,) * layout.stages,
        weight=(weight,) * layout.stages,
        vision_forward=tuple((vision_forward,) * count for count in parts),
        vision_backward=tuple((vision_backward,) * count for count in parts),
        hop=hop,
        reduce=reduce,
    )


def durations(table: Table, costs: Costs) -> tuple[tuple[float, ...], ...]:
    """Cost of each operation, laid out as `table.ranks`. Prefetch and release cost nothing."""
    layout, split = table.layout, table.splits_backward
    weight = costs.weight or (0,) * layout.stages
    rest = [whole - part for whole, part in zip(costs.backward, weight, strict=True)]
    by_stage = {FORWARD: costs.forward, BACKWARD: rest if split else costs.backward, WEIGHT: weight}
    by_part = {VISION_FORWARD: costs.vision_forward, VISION_BACKWARD: costs.vision_backward}

    def duration(rank: int, op: Op) -> float:
        if op.kind in by_stage:
            return by_stage[op.kind][layout.stage(rank, op.chunk)]
        if op.kind in by_part:
            return by_part[op.kind][op.microbatch][op.chunk]
        return costs.reduce if op.kind == REDUCE else 0

    return tuple(tuple(duration(rank, op) for op in ops) for rank, ops in enumerate(table.ranks))


def simulate(table: Table, costs: Costs) -> Timeline:
    """Start every operation as soon as its rank is free and its inputs are there.

    Linear in the number of operations. Raises:
        DeadlockError: operations wait for each other in a circle.
    """
    spent = durations(table, costs)
    starts: list[list[float]] = [[] for _ in table.ranks]
    ends: list[list[float]] = [[] for _ in table.ranks]
    ended: dict[tuple[int, Op], float] = {}
    for rank, index, needed in walk(table):
        start = ends[rank][-1] if index else 0
        for before in needed:
            start = max(start, ended[before] if before[0] == rank else ended[before] + costs.hop)
        end = start + spent[rank][index]
        starts[rank].append(start)
        ends[rank].append(end)
        ended[rank, table.ranks[rank][index]] = end
    return Timeline(table, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


class _Recent:
    """The last timelines that were asked for."""

    timelines: tuple[tuple[Table, Costs, Timeline], ...] = ()


def recalled(table: Table, costs: Costs) -> Timeline:
    """`simulate`, once where the same is asked for again soon, as in the parts of one plan."""
    for known, spent, timeline in _Recent.timelines:
        if known == table and spent == costs:
            return timeline
    timeline = simulate(table, costs)
    _Recent.timelines = ((table, costs, timeline), *_Recent.timelines[: RECALLED - 1])
    return timeline


def peak_held(table: Table, rank: int, sizes: Sequence[Sequence[float]]) -> list[float]:
    """What a rank holds at the worst moment between forwards and the ends of their backwards, by kind.

    `sizes[stage]` lists, kind by kind, what one micro-batch leaves behind in a stage. It is held until B, or
    until W where the table splits the backward, except between a release and its prefetch. The worst moment
    is that of the largest sum.
    """
    last = WEIGHT if table.splits_backward else BACKWARD
    signs = {FORWARD: 1, PREFETCH: 1, RELEASE: -1, last: -1}
    held: list[float] = [0] * len(sizes[0])
    worst = held
    for op in table.ranks[rank]:
        sign = signs.get(op.kind)
        if sign is not None:
            saved = sizes[table.layout.stage(rank, op.chunk)]
            held = [now + sign * part for now, part in zip(held, saved, strict=True)]
            worst = max(worst, held, key=sum)
    return worst

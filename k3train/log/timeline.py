"""`timeline.json`: when every pipeline rank ran each operation of a few steps. Imports no torch.

    {"schema": 1, "schedule": "1f1b", "pipeline": p, "virtual": v, "microbatches": m, "vee": false,
     "steps": [{"step": n, "ranks": [[[kind, chunk, microbatch, start, end], ...], ...]}, ...]}

`ranks` has one list for each pipeline rank, in the order of execution; kinds are those of
`parallel.pipeline.table`. Times are seconds of one clock for all ranks.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from parallel.pipeline.build import usual
from parallel.pipeline.draw import chrome_trace, idle_share
from parallel.pipeline.simulate import Costs, Timeline, simulate
from parallel.pipeline.table import (
    BACKWARD,
    FORWARD,
    KINDS,
    REDUCE,
    VISION_BACKWARD,
    VISION_FORWARD,
    WEIGHT,
    Layout,
    Op,
    Table,
)

from ..errors import UserError
from .metrics import replace_file

FILE_NAME = "timeline.json"
TRACE_NAME = "timeline.trace.json"
SCHEMA = 1

Event = tuple[str, int, int, float, float]
"""(kind, chunk, micro-batch, start, end), seconds."""


@dataclass(frozen=True)
class Recording:
    """Steps of one run: `steps[number][rank]` are a pipeline rank's events in order."""

    layout: Layout
    schedule: str
    steps: Mapping[int, Sequence[Sequence[Event]]]

    def timeline(self, step: int) -> Timeline:
        """A recorded step, its time starting at the first operation of any rank."""
        ranks = self.steps[step]
        origin = min(events[0][3] for events in ranks if events)
        ops = tuple(tuple(_op(e) for e in events) for events in ranks)
        table = Table(self.layout, ops, self.schedule, _part_counts(ops, self.layout))
        starts = tuple(tuple(e[3] - origin for e in events) for events in ranks)
        ends = tuple(tuple(e[4] - origin for e in events) for events in ranks)
        return Timeline(table, starts, ends)

    def median_timeline(self) -> Timeline:
        """The recorded step of median length."""
        timelines = sorted(map(self.timeline, self.steps), key=lambda timeline: timeline.makespan)
        return timelines[(len(timelines) - 1) // 2]

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        layout = self.layout
        return {
            "schema": SCHEMA,
            "schedule": self.schedule,
            "pipeline": layout.pipeline,
            "virtual": layout.virtual,
            "microbatches": layout.microbatches,
            "vee": layout.vee,
            "steps": [{"step": step, "ranks": ranks} for step, ranks in self.steps.items()],
        }

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The recording in a parsed file. Raises ValueError that says what is wrong with it."""
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        sizes: list[Any] = [content.get(name) for name in ("pipeline", "virtual", "microbatches")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError("pipeline, virtual and microbatches must be 1 or more")
        pipeline, virtual, microbatches = sizes
        vee = bool(content.get("vee", False))
        if vee and virtual != 2:
            raise ValueError("a V has two chunks on each rank")
        layout = Layout(pipeline, virtual, microbatches, vee)
        steps = {entry["step"]: _ranks(entry, layout) for entry in _entries(content)}
        return cls(layout, str(content.get("schedule", usual(virtual))), steps)


@dataclass(frozen=True)
class Comparison:
    """A measured step beside the plan of the same operations with the run's own median costs.

    The tower's are the step's own: its images are others in every step.
    """

    planned: Timeline
    measured: Timeline
    planned_idle: list[float]
    """Each rank's idle time over the time of the whole."""
    measured_idle: list[float]
    """The same, the median of all recorded steps."""

    @property
    def points(self) -> float:
        """Percentage points between the plan and the measurement on the rank where they differ most."""
        pairs = zip(self.planned_idle, self.measured_idle, strict=True)
        return max(100 * abs(planned - measured) for planned, measured in pairs)

    def figures(self) -> dict[str, Any]:
        """Plain data: idle shares by rank, the largest difference, and the time of both."""
        return {
            "planned_idle": self.planned_idle,
            "measured_idle": self.measured_idle,
            "points": self.points,
            "planned_seconds": float(self.planned.makespan),
            "measured_seconds": float(self.measured.makespan),
        }


def write(folder: Path, recording: Recording) -> None:
    """Write the run folder's file, and the step of median length as a Chrome trace. Raises OSError."""
    replace_file(folder / FILE_NAME, json.dumps(recording.to_json(), separators=(",", ":")).encode())
    events = chrome_trace(recording.median_timeline(), unit="s")
    replace_file(folder / TRACE_NAME, json.dumps(events).encode())


def read(folder: Path) -> Recording:
    """The recording of a run folder. Raises UserError where there is none or it is not whole."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a run whose pipeline has recorded it")
    try:
        return Recording.from_json(json.loads(path.read_text()))
    except ValueError as error:
        raise UserError(f"{path}: not a recorded timeline, {error}; train again to replace it") from error


def median_costs(recording: Recording) -> Costs:
    """Seconds of each kind of operation: the median over all steps and micro-batches of each stage.

    A whole backward is its two parts where the run split it. Vision operations have their own cost for each
    micro-batch and part, the median over steps. Messages cost nothing: their time is the measured gaps.
    """
    spent: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    vision: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)
    for ranks in recording.steps.values():
        for rank, events in enumerate(ranks):
            for kind, chunk, microbatch, start, end in events:
                if kind in (VISION_FORWARD, VISION_BACKWARD):
                    vision[kind, microbatch, chunk].append(end - start)
                elif kind in (FORWARD, BACKWARD, WEIGHT):
                    spent[kind, recording.layout.stage(rank, chunk)].append(end - start)
                else:
                    spent[kind, 0].append(end - start)
    stages = range(recording.layout.stages)
    forward, ahead, weight = (
        [_median(spent.get((kind, stage), ())) for stage in stages] for kind in (FORWARD, BACKWARD, WEIGHT)
    )
    return Costs(
        forward=forward,
        backward=[first + second for first, second in zip(ahead, weight, strict=True)],
        weight=weight if any(weight) else (),
        vision_forward=_by_part(vision, VISION_FORWARD, recording.layout.microbatches),
        vision_backward=_by_part(vision, VISION_BACKWARD, recording.layout.microbatches),
        reduce=_median(spent.get((REDUCE, 0), ())),
    )


def vision_seconds(recording: Recording) -> tuple[float, float] | None:
    """Seconds of the tower's forward and of its backward for a micro-batch of the run.

    The mean over the micro-batches of a step, those without images too; of the steps, the median. None where
    no step had images.
    """
    forward, backward = (
        statistics.median(
            sum(end - start for events in ranks for name, _, _, start, end in events if name == kind)
            for ranks in recording.steps.values()
        )
        for kind in (VISION_FORWARD, VISION_BACKWARD)
    )
    count = recording.layout.microbatches
    return (forward / count, backward / count) if forward and backward else None


def compare(recording: Recording) -> Comparison:
    """The step whose length is the median one against its simulation with `median_costs`."""
    timelines, measured = list(map(recording.timeline, recording.steps)), recording.median_timeline()
    forward, backward = _own_vision(measured)
    costs = replace(median_costs(recording), vision_forward=forward, vision_backward=backward)
    planned = simulate(measured.table, costs)
    ranks = range(recording.layout.pipeline)
    return Comparison(
        planned,
        measured,
        [idle_share(planned, rank) for rank in ranks],
        [statistics.median(idle_share(timeline, rank) for timeline in timelines) for rank in ranks],
    )


def _own_vision(timeline: Timeline) -> tuple[list[list[float]], list[list[float]]]:
    """What the tower's forwards and backwards took in one step, by micro-batch and part."""
    spent = {
        (op.kind, op.microbatch, op.chunk): [end - start]
        for ops, starts, ends in zip(timeline.table.ranks, timeline.starts, timeline.ends, strict=True)
        for op, start, end in zip(ops, starts, ends, strict=True)
    }
    count = timeline.table.layout.microbatches
    return _by_part(spent, VISION_FORWARD, count), _by_part(spent, VISION_BACKWARD, count)


def _median(values: Iterable[float]) -> float:
    gathered = list(values)
    return statistics.median(gathered) if gathered else 0.0


def _by_part(
    spent: Mapping[tuple[str, int, int], Sequence[float]], kind: str, microbatches: int
) -> list[list[float]]:
    """Medians by micro-batch and part; nothing without vision."""
    found: list[list[float]] = [[] for _ in range(microbatches)]
    for (of_kind, microbatch, _), values in sorted(spent.items()):
        if of_kind == kind:
            found[microbatch].append(statistics.median(values))
    return found if any(found) else []


def _op(event: Event) -> Op:
    return Op(*event[:3])


def _part_counts(ranks: Sequence[Sequence[Op]], layout: Layout) -> tuple[int, ...]:
    """Parts of each micro-batch's images; () where the step had none."""
    counts = [0] * layout.microbatches
    for op in (op for ops in ranks for op in ops if op.kind == VISION_FORWARD):
        counts[op.microbatch] += 1
    return tuple(counts) if any(counts) else ()


def _entries(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    steps = content.get("steps")
    if not isinstance(steps, list) or not steps:
        raise ValueError("it has no steps")
    for entry in steps:
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise ValueError("a step has no number")
    return steps


def _ranks(entry: Mapping[str, Any], layout: Layout) -> list[list[Event]]:
    """The events of one step, checked."""
    where, ranks = f"step {entry['step']}", entry.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != layout.pipeline:
        raise ValueError(f"{where} does not have {layout.pipeline} ranks")
    checked = [[_event(event, where, layout) for event in events] for events in ranks]
    every = {(chunk, number) for chunk in range(layout.virtual) for number in range(layout.microbatches)}
    for rank, events in enumerate(checked):
        if any({event[1:3] for event in events if event[0] == kind} != every for kind in (FORWARD, BACKWARD)):
            raise ValueError(f"{where}, rank {rank} lacks a forward or a backward")
        if any(later[3] < earlier[4] - 1e-6 for earlier, later in pairwise(events)):
            raise ValueError(f"{where}, rank {rank} has operations that overlap")
    return checked


def _event(event: Any, where: str, layout: Layout) -> Event:
    if not isinstance(event, list) or len(event) != 5 or event[0] not in KINDS:
        raise ValueError(f"{where} has an event that is not [kind, chunk, microbatch, start, end]")
    kind, chunk, microbatch, start, end = event
    if not (isinstance(chunk, int) and isinstance(microbatch, int) and microbatch < layout.microbatches):
        raise ValueError(f"{where} has an operation outside the layout: {event[:3]}")
    times = [value for value in (start, end) if isinstance(value, int | float) and math.isfinite(value)]
    if len(times) < 2 or end < start:
        raise ValueError(f"{where}, {kind}({chunk},{microbatch}) has no times")
    return kind, chunk, microbatch, float(start), float(end)

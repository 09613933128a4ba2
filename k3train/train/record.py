"""Records when the operations of some steps ran, on every rank of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from parallel.groups import Groups
from parallel.pipeline.build import usual
from parallel.pipeline.clock import Event, StepClock
from parallel.pipeline.table import Layout

from ..log.timeline import Recording
from .activations import record
from .pipeline import Pipeline


class Recorder:
    """Measures the steps behind the first one, and the last ones, of a run."""

    def __init__(self, pipeline: Pipeline, groups: Groups, *, first: int, last: int, steps: int) -> None:
        """Record `steps` steps from `first` + 1 on and as many up to `last`; the first one warms up."""
        self.pipeline, self.groups = pipeline, groups
        self._chosen = {*range(first + 1, first + 1 + steps), *range(max(first, last - steps) + 1, last + 1)}
        self._events: dict[int, list[Event]] = {}
        self.held: list[str] = []
        """JSON lines of what the activation manager of this rank held in the measured steps."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measure the block's training step if it is one of the chosen; then a collective of its pipeline."""
        if number not in self._chosen:
            yield
            return
        self.pipeline.clock = clock = StepClock(self.groups.pg_collection.pp)
        try:
            yield
        finally:
            self.pipeline.clock = None
        self._events[number] = clock.events()
        activations = self.pipeline.activations
        if activations is not None and activations.ledger.series is not None:
            rank = self.groups.pg_collection.pp.rank()
            self.held += record(self._events[number], activations.ledger.series, rank, number)

    def gather_held(self) -> list[str]:
        """`held` of all ranks of this pipeline; a collective of it."""
        group = self.groups.pg_collection.pp
        ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(ranks, self.held, group=group)
        return [line for lines in ranks for line in lines]

    def gather(self) -> Recording | None:
        """What rank 0's pipeline recorded, on rank 0; None elsewhere and where nothing was. A collective."""
        group = self.groups.pg_collection.pp
        ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(ranks, self._events, group=group)
        if not self._events or not self.groups.is_first:
            return None
        config = self.pipeline.config
        layout = Layout(config.parallel.pipeline, config.parallel.virtual, config.run.microbatches)
        steps = {step: [rank[step] for rank in ranks] for step in self._events}
        return Recording(layout, usual(layout.virtual), steps)

"""Runs a step's micro-batches through the pipeline's table, and keeps what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

from offload.manager import ActivationManager
from parallel.groups import Groups
from parallel.pipeline.build import forward_only as without_backward
from parallel.pipeline.build import with_activation_moves, with_reductions
from parallel.pipeline.check import check
from parallel.pipeline.clock import BusyClock, StepClock
from parallel.pipeline.place import Place
from parallel.pipeline.runtime import TableExecutor
from parallel.pipeline.table import Table
from parallel.pipeline.wires import Wires, open_wires
from parallel.zero2 import SLOTS
from parallel.zero2.rotator import Rotator

from ..activation_time import operations_ahead
from ..config import Config
from ..schedule import Bundles, layer_cuts, pipeline_table, row_plan, stage_costs, vision_table
from ..vision_shapes import Grid
from .tower import Tower

KEPT = 64
"""Executors that are kept: micro-batches with other images need other tables."""


class Pipeline:
    """One rank's executors, one for each kind of step that it has met."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        tower: Tower | None = None,
        rotator: Rotator | None = None,
        activations: ActivationManager | None = None,
    ) -> None:
        """`rotator`: of the chunks' gradient buffers under ZeRO-2."""
        self.config, self.groups, self.tower, self.rotator = config, groups, tower, rotator
        self.activations = activations
        self.clock: StepClock | None = None
        """Set for a step that is to be measured."""
        self.busy: BusyClock | None = None
        """Set for a step whose operations' time is to be added up."""
        self.place = Place()
        self.executors: dict[Any, TableExecutor] = {}
        self._bundles: dict[Any, Bundles] = {}
        self._planned: dict[Any, Future[tuple[Table, Bundles]]] = {}
        self._planner = ThreadPoolExecutor(1, "planner")

    def run(
        self,
        *,
        forward_step_func: Callable[..., Any],
        batches: list[Any],
        chunks: list[Any],
        forward_only: bool = False,
    ) -> list[Any]:
        """Every micro-batch through every chunk, and back unless `forward_only`; a collective.

        Returns what the loss function reported for each micro-batch on the rank of the last stage, else [].
        """
        data = self.config.data
        executor = self._executor(batches, forward_only)
        executor.clock, executor.place = self.clock, self.place
        executor.busy = None if forward_only else self.busy
        with nullcontext() if forward_only else self._step():
            reports = executor(
                forward_step_func=forward_step_func,
                data_iterator=[iter(batches) for _ in chunks],
                model=chunks,
                num_microbatches=len(batches),
                seq_length=data.sequence_length,
                micro_batch_size=data.micro_batch_size,
                forward_only=forward_only,
                pg_collection=self.groups.pg_collection,
                tower=self.tower,
            )
        if self.tower is not None:
            self.tower.unload()
        return reports

    @contextmanager
    def _step(self) -> Iterator[None]:
        """A training step of the activation manager, measured when the clock is."""
        if self.activations is None:
            yield
            return
        self.activations.begin_step(record=self.clock is not None)
        try:
            yield
        finally:
            self.activations.end_step()

    def prepare(self, grids: Sequence[Sequence[Grid]]) -> None:
        """Start, in a thread, to plan a training step to come: filling a large table takes seconds."""
        key = tuple(map(tuple, grids))
        if (key, False) not in self.executors and key not in self._planned:
            self._planned[key] = self._planner.submit(self.table, key)

    @cached_property
    def _ahead(self) -> int:
        """Operations of a rank by which the fetching of activations comes before their backward."""
        topology = self.groups.topology
        costs = stage_costs(self.config, topology, layer_cuts(self.config, topology))
        return operations_ahead(self.config, [*costs.forward, *costs.backward])

    @cached_property
    def wires(self) -> Wires | None:
        """This rank's connections to its neighbours; a collective over all ranks when first used."""
        topology = self.groups.topology
        if topology.pipeline == 1:
            return None
        return open_wires(
            self.groups.pg_collection.pp, topology.groups("pipeline"), vision=self.tower is not None
        )

    def table(self, grids: Sequence[Sequence[Grid]]) -> tuple[Table, Bundles]:
        """The training table of micro-batches with these images, and which image is in which part."""
        topology = self.groups.topology
        bundles: Bundles = []
        table = pipeline_table(self.config, topology, microbatches=len(grids))
        if self.tower is not None:
            costs = stage_costs(self.config, topology, layer_cuts(self.config, topology))
            table, _, bundles = vision_table(self.config, table, costs, grids, topology)
        if self.activations is not None:
            table = with_activation_moves(table, self._ahead)
        return with_reductions(table, bursts=self.rotator is not None), bundles

    def _executor(self, batches: list[Any], forward_only: bool) -> TableExecutor:
        grids = tuple(tuple(batch.get("grids", ())) for batch in batches)
        key = grids, forward_only
        if key not in self.executors:
            self._forget_oldest()
            planned = self._planned.pop(grids, None)
            table, self._bundles[grids] = planned.result() if planned else self.table(grids)
            self.executors[key] = self.build(table, forward_only=forward_only)
        if self.tower is not None:
            self.tower.load(batches, self._bundles[grids])
        return self.executors[key]

    def _forget_oldest(self) -> None:
        while len(self.executors) >= KEPT:
            grids, forward_only = next(iter(self.executors))
            del self.executors[grids, forward_only]
            if (grids, not forward_only) not in self.executors:
                self._bundles.pop(grids, None)

    def build(self, table: Table, *, forward_only: bool = False) -> TableExecutor:
        """What executes a training step's table, or its forwards, on this rank; first a collective."""
        topology = self.groups.topology
        rows = row_plan(self.config, topology, layer_cuts(self.config, topology))
        # That the program's posts end under any transport follows from its order: seen once, it is enough.
        check(table, rows=rows, buffers=SLOTS if self.rotator else None, transport=not self.executors)
        if forward_only:
            table = without_backward(table)
        rank = self.groups.pg_collection.pp.rank()
        return TableExecutor(
            table, rows, self.wires, rank, activations=self.activations, gradients=self.rotator
        )

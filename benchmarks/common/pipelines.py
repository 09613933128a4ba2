"""One rank of a pipeline whose steps are measured: a model, and any executor through which they go.

A step is forward and backward of all micro-batches with the sums of gradients; weights stay as they are, so
that every step has the same work. Letters: b batch, s sequence.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from k3train.layout import layout_of
from k3train.ops.packing import Packing
from k3train.schedule import layer_cuts, row_plan
from k3train.train.assemble import build_trainer, set_numerics
from k3train.train.step import Batch, Losses, run_batches
from k3train.vision_shapes import Grid, patch_values, patches, tokens
from launch.compose import compose, resolve_layout
from parallel.groups import destroy, initialize
from parallel.pipeline.clock import Event, StepClock
from parallel.pipeline.reference import ReferenceSchedule
from parallel.pipeline.runtime import TableExecutor
from parallel.pipeline.table import Table

TIMEOUT_MINUTES = 2


@dataclass(frozen=True)
class Measured:
    """A step of all pipeline ranks."""

    seconds: float
    """Of the slowest rank."""
    ranks: list[list[Event]]
    """Each rank's operations; megatron-core's schedule notes none."""
    core_share: float
    """CPU time over the time of the operations, on the rank where it is least. Well below 1: something else
    ran on the cores, and the times say little. 1 on a GPU and where operations are not noted."""
    losses: Losses

    def equals(self, other: Measured) -> bool:
        """One loss: bit for bit on a CPU; some GPU kernels add with atomics, in any order."""
        bound = 1e-3 if torch.cuda.is_available() else 0.0
        return math.isclose(self.losses.loss, other.losses.loss, rel_tol=bound, abs_tol=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first operation of any rank to the end of the last one; gradient sums follow."""
        return max(events[-1][4] for events in self.ranks) - min(events[0][3] for events in self.ranks)


class PipelineRank:
    """Builds the model of this rank; `close` at the end. Collective, like all of it."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.config = resolve_layout(compose(overrides), int(os.environ["WORLD_SIZE"]))
        set_numerics(self.config)
        place = layout_of(self.config)
        self.groups = initialize(
            place, device=self.config.run.device, timeout_minutes=TIMEOUT_MINUTES, seed=1
        )
        self.trainer = build_trainer(self.config, self.groups)
        self.cuts = layer_cuts(self.config, place)
        self.rows = row_plan(self.config, place, self.cuts)
        self.wires = self.trainer.pipeline.wires
        self._generator = torch.Generator().manual_seed(self.config.run.seed)

    def executor(self, table: Table, *, cache: bool = True) -> TableExecutor:
        """Through `table`; without `cache`, every message carries the whole bank."""
        return TableExecutor(table, replace(self.rows, cache=cache), self.wires, self.rank)

    def megatron_core(self) -> ReferenceSchedule:
        """Through megatron-core's own schedule."""
        return ReferenceSchedule(replace(self.rows, cache=False), self.rank)

    @property
    def rank(self) -> int:
        """In the pipeline."""
        return self.groups.pg_collection.pp.rank()

    def step(self, executor: Any, batches: list[Batch]) -> Measured:
        """Measure one step, from where all ranks stand together."""
        for module in self.trainer.modules:
            module.train()
            module.zero_grad_buffer()
        self.trainer.pipeline = _One(self, executor)  # type: ignore[assignment]
        group = self.groups.pg_collection.pp
        clock = executor.clock = StepClock(group)
        start, worked = time.perf_counter(), time.process_time()
        losses = run_batches(self.trainer, batches)
        if self.groups.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, worked = time.perf_counter() - start, time.process_time() - worked
        events = clock.events()
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, (seconds, self._core_share(worked, events), events), group=group)
        took, shares, ranks = map(list, zip(*gathered, strict=True))
        return Measured(max(took), ranks, min(shares), losses)

    def batches(self, grids: Sequence[Sequence[Grid]] = ()) -> list[Batch]:
        """Random tokens, the same on every rank, and images whose tokens stand at the start."""
        data, device = self.config.data, self.groups.device
        count, shape = self.config.run.microbatches, (data.micro_batch_size, data.sequence_length)
        return [
            {
                "tokens": self._random(shape),
                "labels": self._random(shape),
                "loss_mask": torch.ones(shape, device=device),
                "packing": Packing.single(*shape, device),
                **(self._images(grids[index]) if grids else {}),
            }
            for index in range(count)
        ]

    def close(self) -> None:
        """Leave the process groups."""
        destroy()

    def _core_share(self, worked: float, events: list[Event]) -> float:
        busy = sum(end - start for *_, start, end in events)
        return 1.0 if self.groups.device.type == "cuda" or not busy else min(1.0, worked / busy)

    def _random(self, shape: tuple[int, int]) -> torch.Tensor:
        size = self.config.model.vocab_size
        assert size is not None
        return torch.randint(size, shape, generator=self._generator).to(self.groups.device)

    def _images(self, grids: Sequence[Grid]) -> Batch:
        vision, data = self.config.vision, self.config.data
        length = sum(tokens(vision, grid) for grid in grids)
        assert length <= data.micro_batch_size * data.sequence_length, f"{length} image tokens do not fit"
        shape = sum(map(patches, grids)), patch_values(vision)
        device = self.groups.device
        return {
            "grids": list(grids),
            "patches": torch.randn(shape, generator=self._generator).to(device),
            "image_positions": torch.arange(length, device=device),
        }


class _One:
    """Stands for `k3train.train.pipeline.Pipeline`: every step goes through one executor."""

    def __init__(self, rank: PipelineRank, executor: Any) -> None:
        self.rank, self.executor = rank, executor

    def run(
        self, *, forward_step_func: Any, batches: list[Batch], chunks: list[Any], forward_only: bool
    ) -> list[Any]:
        """As `Pipeline.run`."""
        data = self.rank.config.data
        reports: list[Any] = self.executor(
            forward_step_func=forward_step_func,
            data_iterator=[iter(batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(batches),
            seq_length=data.sequence_length,
            micro_batch_size=data.micro_batch_size,
            forward_only=forward_only,
            pg_collection=self.rank.groups.pg_collection,
            tower=self.rank.trainer.tower,
        )
        return reports

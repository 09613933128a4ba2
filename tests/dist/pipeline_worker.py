"""One rank of a toy model in FP64 whose stages read a growing bank, run by a table or megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SIZE, LENGTH, BATCH = 6, 5, 2
FEATURES = 3
"""Features of one part of a micro-batch's images."""


class Stage(nn.Module):
    """One chunk: mixes all sources into the running tensor; closes `created` rows on its way."""

    def __init__(self, config: Any, stage: int, stages: int, created: int) -> None:
        super().__init__()
        self.config, self.stage, self.last = config, stage, stage == stages - 1
        generator = torch.Generator().manual_seed(stage)
        shape = (created + 1, SIZE, SIZE)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / SIZE**0.5)
        self.inputs: list[Any] = [None]
        self.model_type = 1  # megatron-core's schedules ask for one
        self.reductions = 0

    def start_grad_sync(self) -> None:
        self.reductions += 1

    def set_input_tensor(self, inputs: list[Any]) -> None:
        self.inputs = inputs

    def forward(self, data: Tensor) -> Any:
        if self.stage:
            *bank, running = self.inputs
        else:
            bank, running = [], data
            if self.inputs[0] is not None:
                running = torch.cat((self.inputs[0].expand(-1, BATCH, -1), data[len(self.inputs[0]) :]))
        for index, weight in enumerate(self.weight):
            mixed = torch.stack([source * (place + 1) for place, source in enumerate((*bank, running))])
            if index < len(self.weight) - 1:
                bank = [*bank, running]
            running = running + torch.tanh(mixed.mean(0) @ weight)
        return running if self.last else (*bank, running)


class Tower(nn.Module):
    """One matrix on random pictures."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(99)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))
        self.reduced = 0

    def shape(self, microbatch: int, part: int) -> tuple[int, ...]:
        return (1, 1, SIZE)

    def forward(self, microbatch: int, part: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * microbatch + part)
        return torch.randn(1, 1, SIZE, generator=generator, dtype=torch.float64) @ self.weight

    def reduce(self) -> None:
        self.reduced += 1


def microbatch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 + index)
    return torch.randn(LENGTH, BATCH, SIZE, generator=generator, dtype=torch.float64)


def step(data: Iterator[Tensor], model: Stage) -> Any:
    output = model(next(data))
    return output, lambda running: (
        (running**2).sum(),
        torch.tensor(1, dtype=torch.int),
        running.sum().item(),
    )


def sequential(pipeline: int, virtual: int, microbatches: int, made: list[int], parts: list[int]) -> Any:
    """Losses and gradients without a pipeline: tower first, then stage after stage."""
    stages = [
        Stage(None, stage, pipeline * virtual, made.count(stage)) for stage in range(pipeline * virtual)
    ]
    tower, losses = Tower(), []
    for index in range(microbatches):
        sources: Any = (None,)
        if parts and parts[index]:
            sources = (torch.cat([tower(index, part) for part in range(parts[index])]),)
        for stage in stages:
            stage.set_input_tensor(list(sources))
            sources = stage(microbatch(index))
        (sources**2).sum().backward()
        losses.append(sources.sum().item())
    gradients = {f"stage {stage.stage}": stage.weight.grad.tolist() for stage in stages}
    if tower.weight.grad is not None:
        gradients["tower"] = tower.weight.grad.tolist()
    return {"losses": losses, "gradients": gradients}


def pipelined(pipeline: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What this rank makes of each case."""
    from parallel.groups import destroy, initialize
    from parallel.topology import Topology

    groups = initialize(Topology(pipeline=pipeline), timeout_minutes=1, seed=1)
    answers = [_run(groups, pipeline, **case) for case in cases]
    destroy()
    return answers


def _run(
    groups: Any,
    pipeline: int,
    schedule: str,
    virtual: int,
    microbatches: int,
    made: list[int],
    cache: bool = True,
    vision: str = "",
    parts: list[int] | None = None,
    group: int | None = None,
) -> dict[str, Any]:
    """One case through `schedule`; "megatron" is megatron-core's own."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    from parallel.pipeline.reference import ReferenceSchedule
    from parallel.pipeline.rows import RowPlan
    from parallel.pipeline.runtime import TableExecutor
    from parallel.pipeline.table import Layout
    from parallel.pipeline.wires import open_wires

    rank = groups.pg_collection.pp.rank()
    config = ModelParallelConfig(
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=virtual > 1,
        batch_p2p_comm=virtual == 1,
    )
    config.hidden_size, config.calculate_per_token_loss = SIZE, True
    if virtual > 1:
        config.microbatch_group_size_per_vp_stage = pipeline
    layout = Layout(pipeline, virtual, microbatches, vee=schedule == "zbv")
    chunks = [
        Stage(config, stage, layout.stages, made.count(stage))
        for stage in (layout.stage(rank, chunk) for chunk in range(virtual))
    ]
    rows = RowPlan(layout, tuple(made), cache=cache and schedule != "megatron")
    keywords: dict[str, Any] = {
        "forward_step_func": step,
        "data_iterator": [map(microbatch, range(microbatches)) for _ in chunks],
        "model": chunks,
        "num_microbatches": microbatches,
        "seq_length": LENGTH,
        "micro_batch_size": BATCH,
        "pg_collection": groups.pg_collection,
    }
    order: list[str] = []
    for index, chunk in enumerate(chunks):
        _note(chunk, index, order)
    answer: dict[str, Any] = {"rank": rank, "order": order}
    tower = Tower()
    if schedule == "megatron":
        answer["losses"] = ReferenceSchedule(rows, rank)(**keywords)
    else:
        table = _table(schedule, layout, vision, parts, group)
        wires = open_wires(groups.pg_collection.pp, [list(range(pipeline))], vision=bool(parts))
        answer["losses"] = TableExecutor(table, rows, wires, rank)(**keywords, tower=tower)
        answer["bytes"] = wires.bytes_sent
        answer["reductions"] = [tower.reduced, *(chunk.reductions for chunk in chunks)]
    answer["gradients"] = {
        f"stage {chunk.stage}": chunk.weight.grad.tolist()
        for chunk in chunks
        if chunk.weight.grad is not None
    }
    if tower.weight.grad is not None:
        answer["gradients"]["tower"] = tower.weight.grad.tolist()
    return answer


def _table(schedule: str, layout: Any, vision: str, parts: list[int] | None, group: int | None) -> Any:
    from parallel.pipeline import build, check
    from parallel.pipeline.simulate import uniform

    table = build.build(schedule, layout.pipeline, layout.virtual, layout.microbatches, group)
    if parts:
        from parallel.pipeline import vision_fill

        costs = uniform(layout, parts=tuple(parts))
        table = {
            "bubbles": lambda: vision_fill.fill(table, costs),
            "inline": lambda: vision_fill.inline(table, tuple(parts)),
            "phase": lambda: vision_fill.phase(table, costs),
        }[vision]()
    table = build.with_reductions(table) if parts else table
    check.check(table)
    return table


def _note(chunk: Stage, index: int, order: list[str]) -> None:
    """Write down when a chunk runs forward and backward."""
    counts = {"F": 0, "B": 0}

    def note(kind: str) -> None:
        order.append(f"{kind}({index},{counts[kind]})")
        counts[kind] += 1

    chunk.register_forward_pre_hook(lambda *_: note("F"))
    chunk.weight.register_post_accumulate_grad_hook(lambda *_: note("B"))

"""One rank of a parity run: five optimizer steps of a small model on the same tokens in any layout."""

from __future__ import annotations

import atexit
import os
import sys
from functools import partial
from typing import Any

import torch

from launch.compose import compose, resolve_layout

# What `auto` takes on a CPU. Layouts are compared, not kernels, which a GPU would compile for every shape.
PLAIN = (
    "model.backends.kda=chunk",
    "model.backends.short_conv=shift",
    "model.backends.attn_res=lean",
    "model.backends.situ=lean",
    "model.backends.attention=sdpa",
    "model.backends.linear=local",
)
SMALL = (
    *PLAIN,
    "recipe=tiny",
    "parallel=single",
    "vision=none",
    "data.images=[]",
    "optim=adamw",
    "optim.lr=2e-3",
    "model.num_layers=6",
    "model.attn_res_block_size=2",
    "model.hidden_size=48",
    "model.num_heads=2",
    "model.kda_head_dim=16",
    "model.q_lora_rank=24",
    "model.kv_lora_rank=16",
    "model.qk_nope_head_dim=16",
    "model.qk_extra_head_dim=8",
    "model.v_head_dim=16",
    "model.num_experts=8",
    "model.top_k=2",
    "model.latent_size=24",
    "model.expert_ffn_size=32",
    "model.dense_ffn_size=96",
    "model.balance_bins=100",
    "data.sequence_length=40",
    "data.micro_batch_size=2",
    "run.steps=5",
)
MICROBATCHES = 4


def train(overrides: list[str], folder: str, via: str = "") -> list[dict[str, Any]]:
    """Losses, norms and balance of each step; the first gradients and the last weights go to `folder`.

    `via`: "whole bank", where every edge of the pipeline carries all rows, or "megatron-core".
    """
    from k3train.layout import layout_of
    from k3train.model.naming import named_parameters
    from k3train.train.assemble import build_trainer
    from k3train.train.step import evaluate, train_step
    from parallel.groups import initialize

    config = resolve_layout(compose([*SMALL, *overrides]), int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    groups = initialize(layout_of(config), timeout_minutes=1, seed=1)
    trainer = build_trainer(config, groups)
    if via:
        take_another_way(trainer, via)
    ranks, rank = config.parallel.data, groups.pg_collection.dp.rank()
    share = MICROBATCHES // ranks

    def batches(step: int) -> list[dict[str, Any]]:
        length, size = config.data.sequence_length, config.data.micro_batch_size
        generator = torch.Generator().manual_seed(step)
        windows = torch.randint(0, 257, (MICROBATCHES, size, length + 1), generator=generator)
        windows[torch.rand(windows.shape, generator=generator) < 0.05] = 256
        # The last token of each micro-batch counts for nothing, so that token counts are not all alike.
        mask = torch.ones(size, length)
        mask[-1, -1] = 0
        place = groups.device
        batches = [
            place_columns(
                {
                    "tokens": window[:, :-1].contiguous().to(place),
                    "labels": window[:, 1:].contiguous().to(place),
                    "loss_mask": mask.to(place),
                    "sample_ids": torch.arange(size),
                },
                groups.pg_collection.cp,
            )
            for window in windows[rank * share : (rank + 1) * share]
        ]
        if config.vision.enabled:
            for index, batch in enumerate(batches, start=rank * share):
                batch |= images(step, index, place)
        return batches

    reports = []
    loads = watch_loads(trainer)
    for step in range(1, config.run.steps + 1):
        result = train_step(trainer, batches(step), step)
        reports.append(
            {
                "loss": result.losses.loss,
                "mtp_loss": result.losses.mtp_loss,
                "grad_norm": result.grad_norm,
                "bias_range": [layer.bias_range for layer in result.balance.values()],
                "loads": gathered(loads),
            }
        )
        if step == 1:
            gradients = {
                name: parameter.main_grad.cpu().clone()
                for model in trainer.models
                for name, parameter in named_parameters(model)
                if parameter.requires_grad
            }
            if trainer.tower is not None:
                tower = trainer.tower.model.module
                gradients |= {name: each.main_grad.cpu().clone() for name, each in tower.named_parameters()}
    reports.append({"loss": evaluate(trainer, batches(99)).loss})
    weights = {
        name: parameter.detach().cpu().clone()
        for model in trainer.models
        for name, parameter in named_parameters(model)
    }
    torch.save({"gradients": gradients, "weights": weights}, f"{folder}/{groups.rank}.pt")
    leave()
    return reports


def place_columns(batch: dict[str, Any], group: Any) -> dict[str, Any]:
    """A micro-batch with its packing, cut to this rank's columns where a context group shares the rows."""
    from k3train.ops.packing import Packing
    from k3train.train.inputs import columns
    from parallel.context.exchange import even

    packing = Packing.from_tokens(batch["tokens"], 256)
    if group.size() > 1:
        packing = packing.shard(group, even(batch["tokens"].shape[1], group.size()))
        batch = columns(batch, packing)
    return {**batch, "packing": packing}


def watch_loads(trainer: Any) -> dict[str, list[int]]:
    """Entries of each expert, by layer of this rank, over the last step's global batch: filled as it ends."""
    loads: dict[str, list[int]] = {}

    def note(name: str, router: Any, reset: Any) -> None:
        loads[name] = router.load.tolist()
        reset()

    for model in trainer.models:
        for name, layer in model.moe_layers():
            layer.router.reset_counts = partial(note, name, layer.router, layer.router.reset_counts)
    return loads


def gathered(loads: dict[str, list[int]]) -> dict[str, list[int]]:
    """The loads of all pipeline stages, the same on every rank."""
    import torch.distributed as dist

    parts: list[dict[str, list[int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, loads)
    return dict(sorted((name, load) for part in parts for name, load in part.items()))


def leave() -> None:
    """End this rank's part in the process groups, as the last thing that it does but to answer.

    NCCL takes a third of a second to take down each of some 25 groups: on GPUs the process ends without.
    """
    import torch.distributed as dist

    from parallel.groups import destroy

    if not torch.cuda.is_available():
        destroy()
    elif dist.is_initialized():
        dist.barrier()
        torch.cuda.synchronize()
        atexit.register(_end)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def images(step: int, index: int, place: torch.device) -> dict[str, Any]:
    """Images of several sizes and a clip for a micro-batch; the second micro-batch has none."""
    grids = [[(1, 2, 2), (1, 4, 2), (2, 2, 2)], [], [(1, 2, 4)], [(1, 2, 2)] * 5][index]
    generator = torch.Generator().manual_seed(1000 * step + index)
    patches = torch.randn(sum(t * h * w for t, h, w in grids), 588, generator=generator)
    features = sum(h * w // 4 for _, h, w in grids)
    positions = torch.randperm(80, generator=generator)[:features].sort().values
    return {"grids": grids, "patches": patches.to(place), "image_positions": positions.to(place)}


def take_another_way(trainer: Any, via: str) -> None:
    """Give the trainer's pipeline other executors for both kinds of step."""
    import dataclasses

    from k3train.schedule import layer_cuts, row_plan
    from parallel.pipeline.build import forward_only
    from parallel.pipeline.reference import ReferenceSchedule
    from parallel.pipeline.runtime import TableExecutor

    pipeline, topology = trainer.pipeline, trainer.groups.topology
    plan = row_plan(trainer.config, topology, layer_cuts(trainer.config, topology))
    rows = dataclasses.replace(plan, cache=False)
    rank, grids = trainer.groups.pg_collection.pp.rank(), ((),) * MICROBATCHES
    table, _ = pipeline.table(grids)
    for evaluating in (False, True):
        if via == "megatron-core":
            executor: Any = ReferenceSchedule(rows, rank)
        else:
            chosen = forward_only(table) if evaluating else table
            executor = TableExecutor(chosen, rows, pipeline.wires, rank)
        pipeline.executors[grids, evaluating] = executor

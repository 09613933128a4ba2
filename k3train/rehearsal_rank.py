"""Builds what one rank of a layout has, as a run does, without values and without peers; see `rehearsal`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from offload.policy import Storage
from parallel.groups import Groups
from parallel.moonep.plan.place import dealt, inverse
from parallel.pipeline.messages import ACTIVATION, GRADIENT, Message, Step
from parallel.pipeline.runtime import TableExecutor
from parallel.rehearsal import Rehearsal, rehearsed

from .checkpoint.manager import sharded_state
from .checkpoint.optimizer_state import MASTER
from .config import Config
from .data.packed import Sample
from .image_load import default_load
from .layout import layout_of
from .model.dispatch import BalancedDispatcher
from .optim.build import sub_optimizers
from .optim.per_head import PerHeadMuon
from .rehearsal_facts import KINDS, Post, RankFacts, Saved, Stage, Trade
from .train.assemble import build_trainer
from .train.inputs import open_loader
from .train.step import Trainer
from .vision_shapes import PREFIX

FLOAT = 4
OPTIMIZER, VISION = "optimizer.", f"model.{PREFIX}."


def on_device(config: Config) -> Config:
    """The configuration whose tiers below the device are the device: a rehearsal has no bytes to move.

    Experts travel by collectives, as other ranks' memory is not there to reach into.
    """
    offload, expert = config.offload, config.parallel.expert
    transport = "auto" if expert.transport == "peer" else expert.transport
    return replace(
        config,
        offload=replace(
            offload,
            sites=_at_home(offload.sites),
            resolved=_at_home(offload.resolved),
            gradients="device",
            optimizer="device",
        ),
        parallel=replace(config.parallel, expert=replace(expert, transport=transport)),
    )


def _at_home(storages: dict[str, str]) -> dict[str, str]:
    return {site: str(replace(Storage.parse(text), tier=None)) for site, text in storages.items()}


def groups_of(config: Config, rank: int) -> RankFacts:
    """The groups alone. Raises what making them raises."""
    with _in_place_of(config, rank) as rehearsal:
        return _groups(rehearsal)


def rank_of(config: Config, rank: int, *, posts: bool) -> RankFacts:
    """Everything. Raises what building it raises.

    Args:
        config: as `on_device` gives it.
        posts: also plan the step's transfers, which are the same at one place of every pipeline.
    """
    with _in_place_of(config, rank) as rehearsal:
        trainer = build_trainer(config, rehearsal.groups)
        assert trainer.pipeline.wires is not None or rehearsal.groups.topology.pipeline == 1
        wired = _wired(config, trainer) if posts else None
        state = sharded_state(trainer.modules, trainer.optimizer)
        apply_factories(state)
        entries = [entry for entry in nested_values(state) if isinstance(entry, ShardedTensor)]
        held, slack = _bytes(config, trainer, entries)
        return replace(
            _groups(rehearsal),
            built=True,
            stages=tuple(_stages(trainer)),
            numel=_numel(trainer),
            held=held,
            slack=slack,
            experts=dict(_experts(trainer)),
            slots=_slots(trainer),
            saved=tuple(_saved(entry) for entry in entries if is_main_replica(entry.replica_id)),
            trades=tuple(_trades(trainer)),
            samples=_samples(config, rehearsal.groups),
            posts=wired,
        )


def _in_place_of(config: Config, rank: int) -> contextlib.AbstractContextManager[Rehearsal]:
    minutes = config.parallel.timeout_minutes
    return rehearsed(layout_of(config), rank, timeout_minutes=minutes, seed=config.run.seed)


def _groups(rehearsal: Rehearsal) -> RankFacts:
    collection = rehearsal.groups.pg_collection
    members = (collection.pp, collection.dp, collection.cp, collection.ep, collection.expt_dp)
    return RankFacts(
        rank=rehearsal.groups.rank,
        groups={
            kind: tuple(dist.get_process_group_ranks(group))
            for kind, group in zip(KINDS, members, strict=True)
        },
        seats={kind: group.rank() for kind, group in zip(KINDS, members, strict=True)},
        communicators=(rehearsal.communicators.count, rehearsal.communicators.digest),
        collectives={ranks: (made.count, made.digest) for ranks, made in rehearsal.collectives.items()},
    )


def _stages(trainer: Trainer) -> Iterator[Stage]:
    layout, collection = trainer.groups.topology, trainer.groups.pg_collection
    for virtual, chunk in enumerate(trainer.models):
        rows = sum(bool(layer.starts_block) for layer in chunk.layers.values())  # type: ignore[union-attr]
        yield Stage(layout.stage_of(collection.pp.rank(), virtual), chunk.layer_range, rows)


def _numel(trainer: Trainer) -> dict[str, int]:
    found = dict.fromkeys(("dense", "expert", "vision"), 0)
    for chunk in trainer.models:
        for parameter in chunk.parameters():
            apart = not getattr(parameter, "allreduce", True)
            found["expert" if apart else "dense"] += parameter.numel()
    if trainer.tower is not None:
        found["vision"] = sum(parameter.numel() for parameter in trainer.tower.model.parameters())
    return found


def _experts(trainer: Trainer) -> Iterator[tuple[str, tuple[int, ...]]]:
    for chunk in trainer.models:
        for name, layer in chunk.moe_layers():
            logical = inverse(dealt(trainer.config.model.num_experts, layer.ep_group.size()))
            yield name, tuple(logical[place] for place in layer.local_expert_indices)


def _slots(trainer: Trainer) -> int:
    layers = (layer for chunk in trainer.models for _, layer in chunk.moe_layers())
    balanced = (each.token_dispatcher for each in layers)
    return max((each.moonep.slots for each in balanced if isinstance(each, BalancedDispatcher)), default=0)


def _bytes(
    config: Config, trainer: Trainer, entries: Sequence[ShardedTensor]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind of the ledger, and what each may be more by."""
    buffers = [_buffers(chunk) for chunk in trainer.chunks]
    unpadded = [sum(map(_elements, each)) for each in buffers]
    padded = [sum(buffer.numel for buffer in each) for each in buffers]
    padding = sum(
        (buffer.numel - _elements(buffer)) / buffer.data_parallel_world_size
        for each in buffers
        for buffer in each
    )
    # The plan rounds each parameter's share up, where shards are cut across parameters.
    rounding = FLOAT * (int(padding) + len(entries))
    held = {
        "parameters": sum(p.nbytes for chunk in trainer.models for p in chunk.parameters()),
        "gradients": FLOAT * sum(unpadded),
    }
    slack = {"parameters": 0, "gradients": 0, "gradient_slots": 0}
    rotator = trainer.pipeline.rotator
    if rotator is not None:
        held["gradients"] = rotator.store.device_bytes()
        held["gradient_slots"] = FLOAT * min(2, len(padded)) * rotator.largest
        slack |= {"gradients": rounding, "gradient_slots": FLOAT * 2 * (max(padded) - max(unpadded))}
    held |= _states([entry for entry in entries if VISION not in entry.key])
    slack |= {"master_weights": rounding, "optimizer_states": 2 * rounding}
    if trainer.tower is not None:
        tower = [entry for entry in entries if VISION in entry.key and entry.key.startswith(OPTIMIZER)]
        model = trainer.tower.model
        own = sum(p.nbytes for p in model.parameters()) + FLOAT * sum(map(_elements, _buffers(model)))
        held["vision_states"] = own + sum(_states(tower).values())
        slack["vision_states"] = 3 * rounding
    return held, slack


def _buffers(chunk: Any) -> list[Any]:
    """megatron-core's gradient buffers of a chunk."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _elements(buffer: Any) -> int:
    """Of a buffer's parameters, without the gaps between them."""
    return sum(parameter.numel() for parameter in buffer.params)


def _states(entries: Sequence[ShardedTensor]) -> dict[str, int]:
    """Bytes of master weights and of moments among a rank's entries, replicas included."""
    found = {"master_weights": 0, "optimizer_states": 0}
    for entry in entries:
        if entry.key.startswith(OPTIMIZER):
            kind = entry.key.removeprefix(OPTIMIZER).partition(".")[0]
            place = "master_weights" if kind == MASTER else "optimizer_states"
            found[place] += FLOAT * prod(entry.local_shape)
    return found


def _saved(entry: ShardedTensor) -> Saved:
    """An entry whose local tensor may lack leading dimensions of one."""
    apart = entry.prepend_axis_num
    size = (*(1,) * apart, *entry.local_shape)
    kind = str(entry.dtype).removeprefix("torch.")
    return Saved(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), size, kind)


def _trades(trainer: Trainer) -> Iterator[Trade]:
    for part in sub_optimizers(trainer.optimizer):
        inner = part.optimizer
        if isinstance(inner, PerHeadMuon) and inner.process_group is not None:
            ranks = tuple(dist.get_process_group_ranks(inner.process_group))
            for each in inner.exchanges:
                yield Trade(ranks, each.sent, each.received, each.moved)


class _Numbers:
    """A dataset whose samples are their numbers."""

    def __getitem__(self, index: int) -> Sample:
        nothing = np.zeros(1, np.int64)
        return {"tokens": nothing, "labels": nothing, "loss_mask": nothing, "sample_id": index}


def _samples(config: Config, groups: Groups) -> tuple[int, ...]:
    """Numbers of the samples that this rank reads in its first step."""
    loader = open_loader(config, groups, _Numbers())
    try:
        batches = [next(loader) for _ in range(config.run.microbatches)]
        return tuple(number for batch in batches for number in batch["sample_ids"].tolist())
    finally:
        loader.close()


def _wired(config: Config, trainer: Trainer) -> tuple[Post, ...]:
    """What this rank posts in a step, as its executor has it."""
    grids = default_load(config).grids if config.vision.enabled else []
    table, _ = trainer.pipeline.table([grids] * config.run.microbatches)
    executor = trainer.pipeline.build(table)
    rank = trainer.groups.pg_collection.pp.rank()
    return tuple(
        _post(config, executor, rank, step) for step in executor.program if step.action in ("send", "recv")
    )


def _post(config: Config, executor: TableExecutor, rank: int, step: Step) -> Post:
    message = step.item
    assert isinstance(message, Message)
    border = {ACTIVATION: message.stage, GRADIENT: message.stage + 1}.get(message.flow)
    width = 0 if border is None else executor.rows.width(border) * config.model.hidden_size
    peer = message.target if message.source == rank else message.source
    return Post(step.action, str(message), peer, width)

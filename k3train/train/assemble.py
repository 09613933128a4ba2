"""Builds the parts of a run in a fixed order and hands them to each other; no other file knows them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from parallel.groups import Groups
from parallel.topology import Topology

from ..config import Config
from ..model.decoder import LanguageModelChunk
from ..model.init import initialize
from ..model.transformer_config import K3TransformerConfig, transformer_config
from ..model.vision_chunk import VisionChunk
from ..model.vision_init import initialize_vision
from ..optim.build import build_optimizer, build_scheduler
from ..schedule import layer_cuts
from .pipeline import Pipeline
from .step import Trainer
from .tower import Tower


def topology(config: Config) -> Topology:
    """The layout of a resolved configuration."""
    parallel = config.parallel
    assert parallel.data is not None, "the layout has not been resolved"
    return Topology(
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        expert=parallel.expert.size,
        context=parallel.context,
        data=parallel.data,
    )


def build_trainer(config: Config, groups: Groups) -> Trainer:
    """Model chunks, vision tower, optimizer and schedule of this rank, at their initial state."""
    settings = transformer_config(config)
    chunks = build_chunks(config, groups, settings)
    tower = build_tower(config, groups, settings) if config.vision.enabled else None
    modules = [*chunks, *([tower.model] if tower else [])]
    settings.no_sync_func = partial(_without_sync, modules)
    settings.finalize_model_grads_func = partial(_finalize, tower)
    optimizer = build_optimizer(config, modules, groups.pg_collection)
    return Trainer(
        config=config,
        groups=groups,
        chunks=chunks,
        tower=tower,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        pipeline=Pipeline(config, groups, tower),
    )


def build_chunks(
    config: Config, groups: Groups, settings: K3TransformerConfig
) -> list[DistributedDataParallel]:
    """This rank's chunks, initialised, in megatron-core's data-parallel wrapper."""
    collection, virtual_size = groups.pg_collection, config.parallel.virtual
    cuts = layer_cuts(config, groups.topology)
    wrapped = []
    for virtual in range(virtual_size):
        layers = cuts[groups.topology.stage_of(collection.pp.rank(), virtual)]
        vp_stage = virtual if virtual_size > 1 else None
        chunk = LanguageModelChunk(settings, layers, collection, vp_stage=vp_stage)
        chunk.to(groups.device)
        initialize(chunk, config.run.seed)
        wrapped.append(_wrap(config, groups, settings, chunk, first=virtual == 0))
    return wrapped


def build_tower(config: Config, groups: Groups, settings: K3TransformerConfig) -> Tower:
    """The vision tower, the same on every rank."""
    chunk = VisionChunk(settings, config.vision, groups.pg_collection)
    chunk.to(groups.device)
    initialize_vision(chunk.vision, config.run.seed, config.model.init_std)
    model = _wrap(config, groups, settings, chunk, first=False)
    return Tower(config.vision, model, groups.pg_collection.pp, config.model.hidden_size)


def _wrap(
    config: Config, groups: Groups, settings: K3TransformerConfig, chunk: MegatronModule, *, first: bool
) -> DistributedDataParallel:
    return DistributedDataParallel(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # The table says when a chunk's sum starts; nothing waits for it before the step's end.
            overlap_grad_reduce=True,
            use_distributed_optimizer=config.parallel.zero == 1,
        ),
        chunk,
        disable_bucketing=not first,
        pg_collection=groups.pg_collection,
    )


@contextmanager
def _without_sync(modules: list[DistributedDataParallel]) -> Iterator[None]:
    """Keep the wrappers from starting their sums by themselves."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.no_sync())
        yield


def _finalize(
    tower: Tower | None, model: list[DistributedDataParallel], num_tokens: Tensor | None, **keywords: Any
) -> None:
    """megatron-core's end of a backward pass, and the tower's, which has no place among its stages."""
    finalize_model_grads(model, num_tokens, **keywords)
    if tower is not None:
        # By now `num_tokens` is the whole step's, on every rank.
        assert num_tokens is not None
        tower.finish(1 / num_tokens.clamp(min=1))


def set_numerics(config: Config) -> None:
    """Threads and determinism of this process, before anything is computed."""
    torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)

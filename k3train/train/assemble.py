"""Builds the parts of a run in a fixed order and hands them to each other; no other file knows them all."""

from __future__ import annotations

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from parallel.groups import Groups
from parallel.topology import Topology, split_layers

from ..config import Config
from ..model.decoder import LanguageModelChunk
from ..model.init import initialize
from ..model.transformer_config import transformer_config
from ..optim.build import build_optimizer, build_scheduler
from ..shapes import payload_rows
from .step import Trainer


def topology(config: Config) -> Topology:
    """The layout of a resolved configuration."""
    parallel = config.parallel
    assert parallel.data is not None, "the layout has not been resolved"
    return Topology(
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        expert=parallel.expert,
        context=parallel.context,
        data=parallel.data,
    )


def build_trainer(config: Config, groups: Groups) -> Trainer:
    """Model chunks, optimizer and schedule of this rank, at their initial state."""
    parallel = config.parallel
    cuts = split_layers(
        config.model.num_layers, parallel.pipeline * parallel.virtual, parallel.layers_per_chunk
    )
    rows = payload_rows(config.model, cuts)
    chunks = build_chunks(config, groups, cuts, rows)
    optimizer = build_optimizer(config, chunks, groups.pg_collection)
    return Trainer(
        config=config,
        groups=groups,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        payload_rows=rows,
    )


def build_chunks(
    config: Config, groups: Groups, cuts: list[range], rows: int
) -> list[DistributedDataParallel]:
    """This rank's chunks, initialised, in megatron-core's data-parallel wrapper."""
    settings = transformer_config(config, rows)
    settings.finalize_model_grads_func = finalize_model_grads
    collection, parallel = groups.pg_collection, config.parallel
    wrapped = []
    for virtual in range(parallel.virtual):
        layers = cuts[groups.topology.stage_of(collection.pp.rank(), virtual)]
        chunk = LanguageModelChunk(
            settings, layers, collection, vp_stage=virtual if parallel.virtual > 1 else None
        )
        chunk.to(groups.device)
        initialize(chunk, config.run.seed)
        wrapped.append(
            DistributedDataParallel(
                settings,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    overlap_grad_reduce=False,
                    use_distributed_optimizer=parallel.zero == 1,
                ),
                chunk,
                disable_bucketing=virtual > 0,
                pg_collection=collection,
            )
        )
    return wrapped


def set_numerics(config: Config) -> None:
    """Threads and determinism of this process, before anything is computed."""
    torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)

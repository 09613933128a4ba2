"""Builds the parts of a run in a fixed order and hands them to each other; no other file knows them all."""

from __future__ import annotations

import os
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
from megatron.core.utils import unwrap_model
from torch import Tensor

from parallel.groups import Groups, second_expert_group
from parallel.moonep.transport import Transport, open_transport
from parallel.zero2.rotator import Rotator
from parallel.zero2.wrapper import RotatingDataParallel

from ..config import Config
from ..microbatch import tokens_per_microbatch
from ..model.decoder import LanguageModelChunk
from ..model.init import initialize
from ..model.transformer_config import DTYPES, K3TransformerConfig, transformer_config
from ..model.vision_chunk import VisionChunk
from ..model.vision_init import initialize_vision
from ..ops.grouped import padding
from ..optim.build import build_optimizer, build_scheduler
from ..optim.qk_clip import QKClip
from ..quant.qat import ExpertQuantiser
from ..schedule import layer_cuts
from ..vision_context import key_price
from .activations import build_activations
from .pipeline import Pipeline
from .shards import build_rotator, build_stream
from .step import Trainer
from .tower import Tower


def build_trainer(config: Config, groups: Groups) -> Trainer:
    """Model chunks, vision tower, optimizer and schedule of this rank, at their initial state."""
    settings = transformer_config(config)
    if config.parallel.expert.dispatcher == "moonep":
        transport = expert_transport(config, groups)
        settings.expert_transport = lambda: transport
        settings.expert_pad = expert_padding(config, groups.device)
    rotator = build_rotator(config, groups.device)
    chunks = build_chunks(config, groups, settings, rotator)
    tower = build_tower(config, groups, settings) if config.vision.enabled else None
    modules = [*chunks, *([tower.model] if tower else [])]
    settings.no_sync_func = partial(_without_sync, modules)
    settings.finalize_model_grads_func = partial(_finalize, tower)
    optimizer = build_optimizer(config, modules, groups.pg_collection)
    codec = settings.expert_codec()
    return Trainer(
        config=config,
        groups=groups,
        chunks=chunks,
        tower=tower,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        pipeline=Pipeline(config, groups, tower, rotator, build_activations(config, groups, modules)),
        qk_clip=build_qk_clip(config, groups, chunks),
        stream=build_stream(config, groups.device, optimizer, rotator),
        quantiser=codec if isinstance(codec, ExpertQuantiser) else None,
    )


def build_qk_clip(config: Config, groups: Groups, chunks: list[DistributedDataParallel]) -> QKClip | None:
    """What bounds attention logits, where the optimizer asks for it."""
    if not config.optim.qk_clip:
        return None
    return QKClip(unwrap_model(chunks), config.optim.qk_clip, groups.pg_collection.dp_cp)


def expert_transport(config: Config, groups: Groups) -> Transport:
    """The transport that all MoE layers of this rank share; a collective over all ranks."""
    group, requested = groups.pg_collection.ep, config.parallel.expert.transport
    # What "auto" finds may differ between groups, and all ranks make this one together.
    second = None if requested == "peer" else second_expert_group(groups)
    return open_transport(requested, group if group.size() > 1 else None, groups.device, second)


def expert_padding(config: Config, device: torch.device) -> int:
    """Rows to which the products of an expert's rows are rounded up so that they take the least time."""
    model = config.model
    latent, width = model.latent_size, model.expert_ffn_size
    return padding(
        tokens_per_microbatch(config) * model.top_k,
        model.num_experts // config.parallel.expert.size,
        ((latent, 2 * width), (width, latent)),
        device,
        DTYPES[model.dtype],
        backend=model.backends.grouped,
    )


def build_chunks(
    config: Config, groups: Groups, settings: K3TransformerConfig, rotator: Rotator | None
) -> list[DistributedDataParallel]:
    """This rank's chunks, initialised, in megatron-core's data-parallel wrapper or ZeRO-2's."""
    collection, virtual_size = groups.pg_collection, config.parallel.virtual
    cuts = layer_cuts(config, groups.topology)
    wrapped = []
    for virtual in range(virtual_size):
        layers = cuts[groups.topology.stage_of(collection.pp.rank(), virtual)]
        vp_stage = virtual if virtual_size > 1 else None
        chunk = LanguageModelChunk(settings, layers, collection, vp_stage=vp_stage)
        chunk.to(groups.device)
        initialize(chunk, config.run.seed)
        wrapped.append(_wrap(config, groups, settings, chunk, rotator))
    return wrapped


def build_tower(config: Config, groups: Groups, settings: K3TransformerConfig) -> Tower:
    """The vision tower, the same on every rank."""
    chunk = VisionChunk(settings, config.vision, groups.pg_collection)
    chunk.to(groups.device)
    initialize_vision(chunk.vision, config.run.seed, config.model.init_std)
    model = _wrap(config, groups, settings, chunk)
    collection = groups.pg_collection
    return Tower(
        config.vision, model, collection.pp, config.model.hidden_size, collection.cp, key_price(config)
    )


def _wrap(
    config: Config,
    groups: Groups,
    settings: K3TransformerConfig,
    chunk: MegatronModule,
    rotator: Rotator | None = None,
) -> DistributedDataParallel:
    wrapper = partial(RotatingDataParallel, rotator=rotator) if rotator else DistributedDataParallel
    return wrapper(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # The table says when a chunk's sum starts; nothing waits for it before the step's end.
            overlap_grad_reduce=True,
            use_distributed_optimizer=config.parallel.zero != 0,
        ),
        chunk,
        # It would put BF16 and FP32 parameters into one group, whose gather gloo joins at one type.
        disable_bucketing=False,
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
    """Threads, determinism and caches of this process, before anything is computed."""
    # Every number of rows is another product to cuBLASLt, which looks a new one up for about 0.2 ms and by
    # default remembers 8,192 of them: fewer than the experts of a step have.
    os.environ.setdefault("CUBLASLT_HEURISTICS_CACHE_CAPACITY", "262144")
    torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)

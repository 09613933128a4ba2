"""Puts Per-Head Muon inside megatron-core's optimizers: where each matrix lies, and who owns its blocks.

megatron-core builds its wrappers around AdamW; each wrapper then gets a `PerHeadMuon` over the same parameter
groups. Under ZeRO the wrapper is a DistributedOptimizer, whose shards follow from the layout of the gradient
buffers, which is the same on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from ..config import Config
from ..model.naming import named_parameters
from ..model.vision_chunk import VisionChunk
from ..shapes import EXPERT, Parameter, compact_parameters, model_dtype
from ..vision_shapes import parameters as vision_parameters
from .groups import Split, split
from .owners import Block, Exchange, Span, assign, cut, exchange, spans
from .per_head import Matrix, PerHeadMuon, Settings

_NUMBER = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class _Named:
    """A parameter that Muon updates."""

    name: str
    split: Split


@dataclass(frozen=True)
class _Part:
    """A matrix of a wrapper: its shards over the ranks, and what this one holds."""

    matrix: Matrix
    blocks: list[Block]


def use_per_head_muon(
    optimizer: MegatronOptimizer, modules: list[DistributedDataParallel], config: Config
) -> None:
    """Replace the AdamW inside each of megatron-core's wrappers, before it has any state.

    Args:
        modules: the wrapped chunks that the optimizer was built over.
    """
    named = {id(parameter): found for parameter, found in _matrices(modules, config)}
    device = next(modules[0].parameters()).device
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            part.optimizer = _build(part, named, config, device)
            part.init_state_fn = _start_state


def _start_state(inner: PerHeadMuon, config: Any = None) -> None:
    inner.start_state()


def _build(part: Any, named: dict[int, _Named], config: Config, device: torch.device) -> PerHeadMuon:
    optim = config.optim
    settings = Settings(optim.muon_momentum, optim.muon_steps, (optim.beta1, optim.beta2), optim.eps)
    if isinstance(part, DistributedOptimizer):
        group = part.data_parallel_group
        chunks, rank, ranks = list(_sharded(part, named)), group.rank(), group.size()
    else:
        group, chunks, rank, ranks = None, [_whole(part, named)], 0, 1
    return PerHeadMuon(
        part.optimizer.param_groups,
        [each.matrix for chunk in chunks for each in chunk],
        _exchanges(chunks, rank, ranks, optim.muon_steps),
        settings,
        device,
        group,
    )


def _exchanges(chunks: list[list[_Part]], rank: int, ranks: int, steps: int) -> list[Exchange]:
    loads = [0.0] * ranks
    built = []
    for chunk in chunks:
        blocks = [block for part in chunk for block in part.blocks]
        built.append(exchange(blocks, assign(blocks, loads, steps), rank, ranks))
    return built


def _matrices(
    modules: list[DistributedDataParallel], config: Config
) -> Iterator[tuple[nn.Parameter, _Named]]:
    """Every parameter of this rank that Muon updates."""
    entries = {entry.name: entry for entry in _entries(config)}
    for module in unwrap_model(modules):
        found = module.named_parameters() if isinstance(module, VisionChunk) else named_parameters(module)
        for name, parameter in found:
            cuts = split(entries[_NUMBER.sub(f".experts.{EXPERT}.", name)], config.model)
            if cuts is not None and parameter.requires_grad:
                yield parameter, _Named(name, cuts)


def _entries(config: Config) -> list[Parameter]:
    model = config.model
    entries = list(compact_parameters(model))
    if config.vision.enabled:
        entries += vision_parameters(config.vision, model.hidden_size, model_dtype(model))
    return entries


def _whole(part: MegatronOptimizer, named: dict[int, _Named]) -> list[_Part]:
    """The matrices of a wrapper that holds all of each: one chunk, since nothing travels."""
    model_of: dict[int, Tensor] = {}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for mains, models in zip(part.fp32_from_float16_groups, part.float16_groups, strict=True):
            model_of |= {id(main): model for main, model in zip(mains, models, strict=True)}
    chunk: list[_Part] = []
    for main in part.get_parameters():
        model = model_of.get(id(main), main)
        if id(model) in named:
            chunk.append(_part(len(chunk), model, named, [Span(0, 0, model.numel())], main, 0))
    return chunk


def _sharded(part: Any, named: dict[int, _Named]) -> Iterator[list[_Part]]:
    """The matrices of each model chunk, in the order of its buffers, those of other ranks included."""
    shards = {id(model): (main, start) for model, main, start in parameter_shards(part)}
    ranks, number = part.data_parallel_group.size(), 0
    for buffers in part.per_model_buffers.values():
        chunk: list[_Part] = []
        for buffer in buffers:
            for model, (start, _, index) in buffer.param_index_map.items():
                if id(model) not in named:
                    continue
                bucket = buffer.buckets[index]
                parts = spans(start - bucket.offset, model.numel(), bucket.grad_data.numel() // ranks)
                main, first = shards.get(id(model), (None, 0))
                chunk.append(_part(number, model, named, parts, main, first))
                number += 1
        yield chunk


def parameter_shards(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(model parameter, FP32 shard, its first flat element) of all that this rank holds."""
    kinds = (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    )
    for models_of_groups, mains_of_groups in kinds:
        for models, mains in zip(models_of_groups, mains_of_groups, strict=True):
            for model, main in zip(models, mains, strict=True):
                yield model, main, part._get_model_param_range_map(model)["param"].start


def _part(
    number: int,
    model: Tensor,
    named: dict[int, _Named],
    parts: list[Span],
    main: Tensor | None,
    start: int,
) -> _Part:
    rows, columns = model.shape
    found = named[id(model)]
    blocks = cut(number, found.split.blocks(columns), parts)
    return _Part(Matrix(found.name, (rows, columns), main, start), blocks)

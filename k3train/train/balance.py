"""Quantile Balancing across ranks: one all-reduce of histograms and loads, then the new biases.

Source: Kimi K3 report. Shapes: L MoE layers of this rank, E experts, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ..model.decoder import LanguageModelChunk
from ..model.dispatch import BalancedDispatcher
from ..model.moe import LatentMoE
from ..model.router import QuantileRouter


@dataclass(frozen=True)
class LayerBalance:
    """How one layer's experts were used in a step."""

    load_max_over_mean: float
    unbiased_load_max_over_mean: float
    rows_max_over_mean: float
    """Of the rows that each expert-parallel rank computed."""
    bias_range: float
    moonep: dict[str, float]
    """`parallel.moonep.stats.Stats.read`; empty with another dispatcher."""


Balance = dict[str, LayerBalance]


@torch.no_grad()
def balance_experts(
    models: list[LanguageModelChunk], groups: ProcessGroupCollection, *, update: bool
) -> Balance:
    """Set every router's bias from the step's global batch, empty its counters, and report all layers.

    Collective over all ranks. With `update` False the counts are dropped: a skipped step leaves no trace.
    """
    layers = [named for model in models for named in model.moe_layers()]
    local: Balance = {}
    if layers:
        _reduce_counts([layer.router for _, layer in layers], groups)
        if update:
            for _, layer in layers:
                _learn(layer)
        # On a GPU the host waits here, once for all layers.
        figures = torch.stack([_figures(layer, groups.ep.size()) for _, layer in layers]).tolist()
        for (name, layer), each in zip(layers, figures, strict=True):
            local[name] = _describe(layer, each)
            layer.router.reset_counts()
    return _gather(local, groups)


def _reduce_counts(routers: list[QuantileRouter], groups: ProcessGroupCollection) -> None:
    """Sum counters over the ranks that hold other tokens of the same layers."""
    for name in ("histogram", "load", "unbiased_load"):
        stacked = torch.stack([getattr(router, name) for router in routers])  # [L, E, B] or [L, E]
        dist.all_reduce(stacked, group=groups.dp_cp)
        for router, total in zip(routers, stacked, strict=True):
            getattr(router, name).copy_(total)


def _learn(layer: LatentMoE) -> None:
    """The router's bias, and what a policy of MoonEP makes of the step's loads."""
    layer.router.update_bias()
    if isinstance(layer.token_dispatcher, BalancedDispatcher):
        layer.token_dispatcher.observe(layer.router.load[layer.logical])


def _figures(layer: LatentMoE, expert_ranks: int) -> Tensor:
    """FP64 [4]: loads of the experts, those without bias, rows of the ranks; the bias's range."""
    router = layer.router
    rows = router.load[layer.logical].view(expert_ranks, -1).sum(1)
    loads = [_max_over_mean(load) for load in (router.load, router.unbiased_load, rows)]
    return torch.stack([*loads, (router.expert_bias.max() - router.expert_bias.min()).double()])


def _describe(layer: LatentMoE, figures: list[float]) -> LayerBalance:
    load, unbiased, rows, bias_range = figures
    moved: dict[str, float] = {}
    if isinstance(layer.token_dispatcher, BalancedDispatcher):
        moved = layer.token_dispatcher.moonep.stats.read()
        rows = moved.get("max_over_mean_after", rows)
    return LayerBalance(load, unbiased, rows, bias_range, moved)


def _max_over_mean(load: Tensor) -> Tensor:
    return load.max() / load.double().mean().clamp(min=1e-9)


def _gather(local: Balance, groups: ProcessGroupCollection) -> Balance:
    """The reports of all pipeline stages, in the order of the layers."""
    if groups.pp.size() == 1:
        return local
    parts: list[Balance] = [{} for _ in range(groups.pp.size())]
    dist.all_gather_object(parts, local, group=groups.pp)
    merged = {name: report for part in parts for name, report in part.items()}
    return dict(sorted(merged.items(), key=lambda item: _layer_order(item[0])))


def _layer_order(name: str) -> tuple[bool, int]:
    _, _, index = name.partition("_")
    return (not index, int(index or 0))

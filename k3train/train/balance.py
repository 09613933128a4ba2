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
from ..model.router import QuantileRouter


@dataclass(frozen=True)
class LayerBalance:
    """How one layer's experts were used in a step."""

    load_max_over_mean: float
    unbiased_load_max_over_mean: float
    rows_max_over_mean: float
    """Of the rows that each expert-parallel rank computed."""
    bias_range: float


Balance = dict[str, LayerBalance]


@torch.no_grad()
def balance_experts(
    models: list[LanguageModelChunk], groups: ProcessGroupCollection, *, update: bool
) -> Balance:
    """Set every router's bias from the step's global batch, empty its counters, and report all layers.

    Collective over all ranks. With `update` False the counts are dropped: a skipped step leaves no trace.
    """
    routers = [named for model in models for named in model.routers()]
    local: Balance = {}
    if routers:
        _reduce_counts([router for _, router in routers], groups)
        for name, router in routers:
            if update:
                router.update_bias()
            local[name] = _describe(router, groups.ep.size())
            router.reset_counts()
    return _gather(local, groups)


def _reduce_counts(routers: list[QuantileRouter], groups: ProcessGroupCollection) -> None:
    """Sum counters over the ranks that hold other tokens of the same layers."""
    for name in ("histogram", "load", "unbiased_load"):
        stacked = torch.stack([getattr(router, name) for router in routers])  # [L, E, B] or [L, E]
        dist.all_reduce(stacked, group=groups.dp_cp)
        for router, total in zip(routers, stacked, strict=True):
            getattr(router, name).copy_(total)


def _describe(router: QuantileRouter, expert_ranks: int) -> LayerBalance:
    return LayerBalance(
        _max_over_mean(router.load),
        _max_over_mean(router.unbiased_load),
        _max_over_mean(router.load.view(expert_ranks, -1).sum(-1)),
        (router.expert_bias.max() - router.expert_bias.min()).item(),
    )


def _max_over_mean(load: Tensor) -> float:
    return (load.max() / load.double().mean().clamp(min=1e-9)).item()


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

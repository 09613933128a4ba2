"""The numbers of one step as they are logged."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from parallel.groups import Groups

from ..config import Config
from .step import StepResult

GIB = 2**30


def step_metrics(
    config: Config, result: StepResult, seconds: float, flops_per_token: float, groups: Groups
) -> dict[str, Any]:
    """Metrics of a step that took `seconds` of wall time, without evaluation and saving.

    Throughput counts every token of the global batch; FLOPs are the model's, by `flops`' conventions.
    """
    losses, world_size = result.losses, groups.topology.world_size
    tokens_per_second = losses.tokens / seconds
    spent = losses.tokens * flops_per_token + losses.vision_flops
    tflops = spent / seconds / world_size / 1e12
    metrics: dict[str, Any] = {"loss": losses.loss}
    if losses.mtp_loss is not None:
        metrics["mtp_loss"] = losses.mtp_loss
    metrics |= {
        "grad_norm": result.grad_norm,
        "lr": result.learning_rate,
        "tokens": losses.tokens,
        "tokens_per_second": tokens_per_second,
        "tflops_per_rank": tflops,
        "mfu": tflops / config.cluster.peak_tflops,
        "memory/peak_gib": peak_memory(groups.device) / GIB,
        "time/step": seconds,
    }
    return metrics | _balance_metrics(result)


def _balance_metrics(result: StepResult) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if result.balance:
        worst = max(layer.rows_max_over_mean for layer in result.balance.values())
        metrics["moe_rows_max_over_mean"] = worst
    for name, layer in result.balance.items():
        metrics[f"moe/expert_load_max_over_mean/{name}"] = layer.load_max_over_mean
        metrics[f"moe/unbiased_load_max_over_mean/{name}"] = layer.unbiased_load_max_over_mean
        metrics[f"moe/bias_range/{name}"] = layer.bias_range
    return metrics | _moonep_metrics([layer.moonep for layer in result.balance.values() if layer.moonep])


def _moonep_metrics(layers: list[dict[str, float]]) -> dict[str, float]:
    """Over all layers: the worst of what is called worst or max, the mean of the rest."""
    if not layers:
        return {}
    found = {name: [layer[name] for layer in layers] for name in layers[0]}
    return {
        f"moonep/{name}": max(values) if name.endswith(("_worst", "_max")) else sum(values) / len(values)
        for name, values in found.items()
    }


def peak_memory(device: torch.device) -> int:
    """Largest memory of this process so far in bytes: allocated on the GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""Where a step went wrong: the first layer, rank and micro-batch whose values are not finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from parallel.zero2.views import is_parked

from ..model.attn_res import ResidualState
from ..model.naming import named_parameters
from .step import Batch, Trainer, run_batches
from .tower import Tower


class NonFiniteError(RuntimeError):
    """Training met a NaN or an infinity."""


def explain_nonfinite(trainer: Trainer, batches: list[Batch], step: int) -> NonFiniteError:
    """Find the origin by running the step's micro-batches forward again, watched; a collective.

    The gradients of the failed step must still be in place.
    """
    gradient = _first_bad_gradient(trainer)
    activation = _first_bad_activation(trainer, batches)
    ranks: list[Any] = [None] * dist.get_world_size()
    samples = [batch["sample_ids"].tolist() for batch in batches]
    dist.all_gather_object(ranks, {"activation": activation, "gradient": gradient, "samples": samples})
    return NonFiniteError(f"step {step}: {_describe(ranks)}")


def _describe(ranks: list[dict[str, Any]]) -> str:
    activations = [(*report["activation"], rank) for rank, report in enumerate(ranks) if report["activation"]]
    if activations:
        microbatch, _, where, rank = min(activations)
        samples = ranks[rank]["samples"][microbatch]
        return (
            f"the output of {where} is not finite on rank {rank}, micro-batch {microbatch}, samples {samples}"
        )
    gradients = [(report["gradient"], rank) for rank, report in enumerate(ranks) if report["gradient"]]
    if gradients:
        name, rank = gradients[-1]
        samples = sorted({sample for batch in ranks[rank]["samples"] for sample in batch})
        return f"the gradient of {name} is not finite on rank {rank}, samples {samples}"
    return "the loss or the gradient norm was not finite, but every value is when the step is run again"


def _first_bad_gradient(trainer: Trainer) -> str | None:
    named = [list(named_parameters(model)) for model in trainer.models]
    if trainer.tower is not None:
        named.insert(0, list(unwrap_model(trainer.tower.model).named_parameters()))
    bad = _bad_gradients(trainer)
    for parameters in reversed(named):
        for name, parameter in reversed(parameters):
            if id(parameter) in bad:
                return name
    return None


def _bad_gradients(trainer: Trainer) -> set[int]:
    """Ids of parameters of whose gradient this rank's part is not finite."""
    if trainer.stream is not None:
        pairs = [pair for window in trainer.stream.gradients() for pair in _not_finite(window)]
        return {id(parameter) for _, parameter in pairs}
    parameters = [parameter for module in trainer.modules for parameter in module.parameters()]
    found = [(parameter.main_grad, parameter) for parameter in parameters if hasattr(parameter, "main_grad")]
    return {id(parameter) for _, parameter in _not_finite([p for p in found if not is_parked(p[0])])}


def _not_finite(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [pair for pair in pairs if not torch.isfinite(pair[0]).all()]


def _first_bad_activation(trainer: Trainer, batches: list[Batch]) -> tuple[int, int, str] | None:
    """(micro-batch, order in the model, name) of the earliest module output that is not finite here."""
    found: list[tuple[int, int, str]] = []
    handles = []
    for model in trainer.models:
        watched: dict[str, nn.Module] = {f"layer {i}": layer for i, layer in model.layers.items()}
        if model.post_process:
            watched["the final norm"] = model.final_norm
        if model.pre_process:
            watched["the embedding"] = model.embedding
        for order, (name, module) in enumerate(watched.items(), start=model.layer_range.start):
            place = -1 if name == "the embedding" else order
            handles.append(module.register_forward_hook(_watch(place, name, found)))
    if trainer.tower is not None:
        tower = unwrap_model(trainer.tower.model)
        handles.append(tower.register_forward_hook(_watch_tower(trainer.tower, found)))
    try:
        with torch.no_grad():
            run_batches(trainer, batches, forward_only=True)
    finally:
        for handle in handles:
            handle.remove()
    return min(found, default=None)


def _watch_tower(tower: Tower, found: list[tuple[int, int, str]]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if not torch.isfinite(output).all():
            found.append((tower.running, -2, "the vision tower"))

    return hook


def _watch(place: int, name: str, found: list[tuple[int, int, str]]) -> Any:
    calls = 0

    def hook(module: nn.Module, inputs: Any, output: Tensor | ResidualState) -> None:
        nonlocal calls
        values = output.running if isinstance(output, ResidualState) else output
        if not torch.isfinite(values).all():
            found.append((calls, place, name))
        calls += 1

    return hook

"""Optimizer state to and from sharded checkpoints, parameter by parameter, whatever the layout.

Every tensor of an optimizer's state belongs to a parameter, and a rank holds a run of its flat elements: all
of them, or ZeRO's shard. A checkpoint knows each under the parameter's name in the whole model, of n elements
([experts, n] for routed experts), and any layout reads the runs it needs. megatron-core stores whole buckets
of gradient buffers instead, which another layout cuts elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from ..model.decoder import LanguageModelChunk
from ..model.naming import named_parameters
from ..optim.per_head import PerHeadMuon
from ..optim.placement import parameter_shards
from .tensors import place

State = dict[str, ShardedTensor]
MASTER = "fp32_param"
COUNTERS = ("step",)


@dataclass(frozen=True)
class Held:
    """A parameter's elements that one of the optimizers updates."""

    inner: torch.optim.Optimizer
    main: Tensor
    """What is updated, FP32: the parameter itself, its master weights, or a flat part of either."""
    model: Tensor
    first: int
    """Flat element of the parameter at which `main` begins."""
    sharded: bool

    def tensors(self) -> dict[str, Tensor]:
        """State beside the parameter, and master weights that are no view of it, by name."""
        state = {name: value for name, value in self.inner.state[self.main].items() if name not in COUNTERS}
        assert all(value.numel() == self.main.numel() for value in state.values()), state.keys()
        return {**state, MASTER: self.main} if self.main.dtype != self.model.dtype else state


def describe(
    optimizer: MegatronOptimizer, modules: list[DistributedDataParallel], model_state: dict[str, Any]
) -> State:
    """The optimizer's state as sharded tensors, one for each run of elements that this rank holds.

    Settings of parameter groups stay out of the checkpoint, and so do step counts: see `step_count`.

    Args:
        modules: the wrapped chunks, and the tower.
        model_state: their sharded state, which says which ranks hold the same parameters.
    """
    _fill_empty_state(optimizer)
    names, replicas = _names(modules), _replicas(model_state)
    described: State = {}
    for held in _held(optimizer):
        name, experts = names[id(held.model)]
        replica = replicas[id(held.model)]
        for kind, tensor in held.tensors().items():
            key = f"{kind}.{name}.{held.first}"
            described[key] = _sharded(tensor.detach(), kind, name, experts, held, replica)
    return described


@torch.no_grad()
def restore(
    optimizer: MegatronOptimizer,
    loaded: dict[str, Tensor],
    step: float | None,
    modules: list[DistributedDataParallel],
) -> None:
    """Put loaded state into the optimizer, once the model has its weights.

    Args:
        loaded: the tensors of what `describe` said of this optimizer.
        step: what `step_count` said when the checkpoint was made.
    """
    names = _names(modules)
    for held in _held(optimizer):
        name, _ = names[id(held.model)]
        for kind, tensor in held.tensors().items():
            tensor.view(-1).copy_(loaded[f"{kind}.{name}.{held.first}"].view(-1))
        if held.main.dtype == held.model.dtype:
            # Not a view of the parameter while states are on a shelf.
            whole = held.model.detach().view(-1)
            held.main.view(-1).copy_(whole[held.first : held.first + held.main.numel()])
    for inner in _inner_optimizers(optimizer):
        _set_step(inner, step)


def step_count(optimizer: MegatronOptimizer) -> float | None:
    """Updates made so far, the same for all of the chained optimizers; None where none of them counts."""
    counts = {
        count for inner in _inner_optimizers(optimizer) for count in _step_counts(inner) if count is not None
    }
    assert len(counts) <= 1, f"parameters have made different numbers of steps: {counts}"
    return counts.pop() if counts else None


def _sharded(
    tensor: Tensor, kind: str, name: str, experts: int | None, held: Held, replica: tuple[int, ...]
) -> ShardedTensor:
    key, expert = place(name)
    numel, size = held.model.numel(), tensor.numel()
    assert expert is None or experts is not None
    return ShardedTensor(
        f"optimizer.{kind}.{key}",
        tensor.view(-1) if expert is None else tensor.view(1, -1),
        tensor.dtype,
        (size,) if expert is None else (1, size),
        (numel,) if expert is None else (experts, numel),
        (held.first,) if expert is None else (expert, held.first),
        # Runs of any length: only the reader can tell whether they cover the parameter, and it does.
        axis_fragmentations=None,
        # Under ZeRO data ranks hold different runs, not copies.
        replica_id=(*replica[:-1], 0) if held.sharded else replica,
    )


def _names(modules: list[DistributedDataParallel]) -> dict[int, tuple[str, int | None]]:
    """Name in the whole model, and number of routed experts of a layer, by the parameter's identity."""
    found: dict[int, tuple[str, int | None]] = {}
    for module in unwrap_model(modules):
        if isinstance(module, LanguageModelChunk):
            experts = module.config.num_moe_experts
            found |= {id(parameter): (name, experts) for name, parameter in named_parameters(module)}
        else:
            found |= {id(parameter): (name, None) for name, parameter in module.named_parameters()}
    return found


def _replicas(model_state: dict[str, Any]) -> dict[int, tuple[int, ...]]:
    """Which of the equal copies each parameter is, by its identity: all zeros for the one that is saved."""
    return {
        id(entry.data): entry.replica_id
        for state in model_state.values()
        for entry in state.values()
        if getattr(entry, "data", None) is not None
    }


def _held(optimizer: MegatronOptimizer) -> Iterator[Held]:
    for part in _parts(optimizer):
        if part.optimizer is None:
            continue
        if isinstance(part, DistributedOptimizer):
            for model, main, first in parameter_shards(part):
                yield Held(part.optimizer, main, model, first, True)
            continue
        model_of: dict[int, Tensor] = {}
        if isinstance(part, Float16OptimizerWithFloat16Params):
            for mains, models in zip(part.fp32_from_float16_groups, part.float16_groups, strict=True):
                model_of |= {id(main): model for main, model in zip(mains, models, strict=True)}
        for main in _parameters(part.optimizer):
            yield Held(part.optimizer, main, model_of.get(id(main), main), 0, False)


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in _parts(optimizer) if part.optimizer is not None]


def _fill_empty_state(optimizer: MegatronOptimizer) -> None:
    """Give parameters that the optimizers have not met yet the state of step zero."""
    for part in _parts(optimizer):
        inner = part.optimizer
        if inner is None:
            continue
        if isinstance(inner, PerHeadMuon):
            inner.start_state()
        elif not _counts_per_parameter(inner):
            if part.init_state_fn is not None:
                part.init_state_fn(inner, part.config)
        else:
            for parameter in _parameters(inner):
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                    }


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW | PerHeadMuon)


def _parameters(inner: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def _step_counts(inner: torch.optim.Optimizer) -> set[float]:
    if _counts_per_parameter(inner):
        return {float(inner.state[parameter]["step"]) for parameter in _parameters(inner)}
    return {float(group["step"]) for group in inner.param_groups if "step" in group and group["params"]}


def _set_step(inner: torch.optim.Optimizer, step: float | None) -> None:
    if _counts_per_parameter(inner):
        for parameter in _parameters(inner):
            inner.state[parameter]["step"] = torch.tensor(0.0 if step is None else step)
    elif step is not None and not isinstance(inner, TensorParallelMuon):  # which counts nothing
        for group in inner.param_groups:
            if isinstance(group.get("step"), torch.Tensor):
                group["step"].fill_(step)
            else:
                group["step"] = int(step)

"""Optimizer state to and from sharded checkpoints, exact for torch's AdamW too.

megatron-core was written for fused Adam, which counts steps per parameter group. With torch's AdamW, which
counts per parameter, it asserts while the state is still empty, copies into leaves that require gradients,
and leaves one shared counter for all parameters, which then advances once for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer

from ..optim.per_head import PerHeadMuon

# Each rank stores what it holds, without communication: a run continues in the layout it was saved in.
METADATA = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}

State = dict[Any, Any]


def describe(optimizer: MegatronOptimizer, model_state: State, *, is_loading: bool) -> State:
    """The optimizer's state as sharded tensors and objects of megatron-core.

    Settings of parameter groups stay out of the checkpoint: megatron-core would give rank 0's to all ranks.

    Args:
        model_state: the model's sharded state, under "model", or "model0", "model1"... with several chunks.
    """
    parts = _parts(optimizer)
    for part in parts:
        if isinstance(part, DistributedOptimizer) and part.optimizer is not None:
            _number_as_stored(part)
    _fill_empty_state(optimizer)
    if is_loading:
        # megatron-core leaves a counter of zero out, and AdamW then misses it.
        _set_steps(optimizer, [1.0] * len(_inner_optimizers(optimizer)))
    with torch.no_grad():
        if any(isinstance(part, Float16OptimizerWithFloat16Params) for part in parts):
            each = [_describe_float16(part, model_state, is_loading=is_loading) for part in parts]
            described = dict(enumerate(each)) if len(each) > 1 else each[0]
        else:
            described = optimizer.sharded_state_dict(
                model_state, is_loading=is_loading, metadata=dict(METADATA)
            )
            for part, state in zip(parts, described.values() if len(parts) > 1 else [described], strict=True):
                if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, PerHeadMuon):
                    _part_second_moments(part, state)
    dict_list_map_inplace(_keep_local, described)
    return described


def restore(optimizer: MegatronOptimizer, loaded: State, steps: list[float | None]) -> None:
    """Put loaded state into the optimizer.

    Args:
        loaded: what megatron-core made of `describe(is_loading=True)`.
        steps: what `step_counts` said when the checkpoint was made.
    """
    with torch.no_grad():
        optimizer.load_state_dict(loaded)
    _set_steps(optimizer, steps)


def step_counts(optimizer: MegatronOptimizer) -> list[float | None]:
    """Updates made by each of the chained optimizers; None where it does not count."""
    return [_step_count(inner) for inner in _inner_optimizers(optimizer)]


def _describe_float16(
    part: Float16OptimizerWithFloat16Params, model_state: State, *, is_loading: bool
) -> State:
    """What megatron-core's own description should say; that one numbers BF16 parameters only, and so gives
    them the shapes of others as soon as a group has FP32 parameters too."""
    if is_loading and part.init_state_fn is not None:
        part.init_state_fn(part.optimizer, part.config)
    state: State = part.state_dict()
    model_of = {
        id(main): model
        for mains, models in zip(part.fp32_from_float16_groups, part.float16_groups, strict=True)
        for main, model in zip(mains, models, strict=True)
    }
    models = [model_of.get(id(parameter), parameter) for parameter in _parameters(part.optimizer)]
    sharded = get_param_id_to_sharded_param_map(model_state, models)
    place = {id(model): index for index, model in enumerate(models)}
    state["fp32_from_fp16_params"] = [
        [
            make_sharded_optimizer_tensor(
                sharded[place[id(model)]], main, prefix="optimizer.state.fp32_param"
            )
            for main, model in zip(mains, models_of_group, strict=True)
        ]
        for mains, models_of_group in zip(part.fp32_from_float16_groups, part.float16_groups, strict=True)
    ]
    inner = state["optimizer"]
    step = next((values["step"] for values in inner["state"].values() if "step" in values), None)
    optim_state_to_sharding_state(inner, sharded, exclude_keys=("step",))
    if step is not None:
        inner["state"]["common_step"] = step
    return state


def _part_second_moments(part: DistributedOptimizer, state: State) -> None:
    """Store AdamW's second moments parameter by parameter.

    megatron-core stores a bucket's states as one tensor each, which a state that some of its parameters lack
    would leave full of holes.
    """
    for number, ranges in enumerate(part.gbuf_ranges):
        order = {id(model): index for index, model in enumerate(part.buffers[number].param_index_map)}
        for dtype, buckets in ranges.items():
            for bucket, entries in zip(buckets, state["param_state"][number][dtype], strict=True):
                held = iter(bucket["param_map"].items())
                for entry in entries:
                    whole = entry.pop("exp_avg_sq", None)
                    if entry["padding"].unwrap():
                        continue
                    model, place = next(held)
                    if whole is not None:
                        first = place["param"].start
                        entry["exp_avg_sq"] = _piece(whole, order[id(model)], model.numel(), first)


def _piece(whole: ShardedTensor, number: int, numel: int, first: int) -> ShardedTensor:
    """A parameter's elements from flat element `first` on, out of a tensor of the bucket's."""
    return ShardedTensor(
        f"{whole.key}.{number}",
        whole.data,
        whole.dtype,
        whole.local_shape,
        (numel,),
        (first,),
        axis_fragmentations=None,
        replica_id=whole.replica_id,
    )


def _number_as_stored(part: DistributedOptimizer) -> None:
    """Correct megatron-core's table of a parameter's place: it ignores that FP32 parameters come first."""
    for group, (full, half) in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
        for order, parameter in enumerate((*full, *half)):
            part.model_param_group_index_map[parameter] = (group, order)


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in _parts(optimizer) if part.optimizer is not None]


def _fill_empty_state(optimizer: MegatronOptimizer) -> None:
    """Give parameters that AdamW has not met yet the state of step zero."""
    for inner in _inner_optimizers(optimizer):
        if isinstance(inner, PerHeadMuon):
            inner.start_state()
        if not _counts_per_parameter(inner):
            continue
        for parameter in _parameters(inner):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW | PerHeadMuon)


def _parameters(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def _step_count(inner: torch.optim.Optimizer) -> float | None:
    if _counts_per_parameter(inner):
        counts = {float(inner.state[parameter]["step"]) for parameter in _parameters(inner)}
    else:
        counts = {float(group["step"]) for group in inner.param_groups if "step" in group and group["params"]}
    assert len(counts) <= 1, f"parameters of one optimizer have made different numbers of steps: {counts}"
    return counts.pop() if counts else None


def _set_steps(optimizer: MegatronOptimizer, steps: list[float | None]) -> None:
    for inner, step in zip(_inner_optimizers(optimizer), steps, strict=True):
        _set_step(inner, step)


def _set_step(inner: torch.optim.Optimizer, step: float | None) -> None:
    if _counts_per_parameter(inner):
        for parameter in _parameters(inner):
            inner.state[parameter]["step"] = torch.tensor(0.0 if step is None else step)
        for group in inner.param_groups:
            # megatron-core leaves a copy here that AdamW never advances.
            group.pop("step", None)
    elif step is not None:
        for group in inner.param_groups:
            if isinstance(group.get("step"), torch.Tensor):
                group["step"].fill_(step)
            else:
                group["step"] = int(step)


def _keep_local(value: Any) -> Any:
    sharded = isinstance(value, ShardedBase | ShardedTensorFactory | LocalNonpersistentObject)
    return value if sharded else LocalNonpersistentObject(value)

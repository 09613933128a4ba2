"""The optimizer and its learning-rate schedule, both megatron-core's, from the configuration."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from parallel.zero2.wrapper import shard_gradients

from ..config import Config
from ..model.transformer_config import DTYPES
from .placement import use_per_head_muon


def build_optimizer(
    config: Config, chunks: list[DistributedDataParallel], pg_collection: ProcessGroupCollection
) -> MegatronOptimizer:
    """AdamW, or Muon for matrices with AdamW for the rest, over all chunks of this rank.

    Clipping is left to `clip.clip_gradients`: megatron-core would round its norm differently in each layout.
    """
    optim = config.optim
    dtype = DTYPES[config.model.dtype]
    settings = OptimizerConfig(
        # Per-Head Muon takes AdamW's place in the wrappers.
        optimizer={"adamw": "adam", "muon": "muon", "muon_per_head": "adam"}[optim.name],
        lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        decoupled_weight_decay=True,
        clip_grad=0.0,
        params_dtype=dtype,
        bf16=config.model.dtype == "bfloat16",
        use_distributed_optimizer=config.parallel.zero != 0,
        muon_momentum=optim.muon_momentum,
        muon_nesterov=True,
        muon_num_ns_steps=optim.muon_steps,
        # Moonlight: coefficients (3.4445, -4.7750, 2.0315) and updates of RMS 0.2, as AdamW's are.
        muon_coefficient_type="simple",
        muon_scale_mode="spectral",
        muon_extra_scale_factor=0.2,
        muon_split_qkv=False,
    )
    optimizer = get_megatron_optimizer(
        settings, chunks, use_gloo_process_groups=False, pg_collection=pg_collection
    )
    if optim.name == "muon_per_head":
        use_per_head_muon(optimizer, chunks, config)
    if config.parallel.zero == 2:
        shard_gradients(optimizer)
    return optimizer


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Linear warm-up, then cosine decay to `min_lr_ratio` of the peak at the last step."""
    optim, steps = config.optim, config.run.steps
    warmup = min(max(1, round(optim.warmup_fraction * steps)), max(steps - 1, 0))
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style="cosine",
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # The schedule is the configuration's: a continued run may be longer than the saved one.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def sub_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that megatron-core chained for dense, expert, Muon and AdamW parameters."""
    return getattr(optimizer, "chained_optimizers", [optimizer])

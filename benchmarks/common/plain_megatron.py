"""megatron-core's own GPTModel of the shape of a k3train configuration: the baseline of `train_step.py`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from k3train.activation_policy import LAYER, recomputes
from k3train.config import Config
from k3train.model.transformer_config import DTYPES
from k3train.optim.build import build_optimizer
from k3train.optim.clip import clip_gradients, gradient_norm
from parallel.groups import Groups


class PlainModel:
    """Forward and backward of one step, by megatron-core alone. No pipeline."""

    def __init__(self, config: Config, groups: Groups, **changes: Any) -> None:
        """`changes`: fields of megatron-core's configuration."""
        self.config, self.groups = config, groups
        cuda = groups.device.type == "cuda"
        settings = plain_config(config, cuda, **changes)
        settings.finalize_model_grads_func = finalize_model_grads
        spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=cuda, vp_stage=None)
        assert config.model.vocab_size is not None
        model = GPTModel(
            settings,
            spec,
            vocab_size=config.model.vocab_size,
            max_sequence_length=config.data.sequence_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            pg_collection=groups.pg_collection,
        )
        if config.model.dtype == "bfloat16":
            model.bfloat16()
        wrapper = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=config.parallel.zero == 1
        )
        self.model = DistributedDataParallel(
            settings, wrapper, model.to(groups.device), pg_collection=groups.pg_collection
        )
        self.description = {
            "model": "GPTModel, MLA and MoE by Transformer Engine spec"
            if cuda
            else "GPTModel, GQA, local spec",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            **{key: getattr(settings, key) for key in ("num_layers", "hidden_size", "num_attention_heads")},
            **{
                key: getattr(settings, key)
                for key in ("num_moe_experts", "moe_router_topk", "moe_latent_size")
            },
        }

    def forward_backward(self, batches: list[dict[str, Any]]) -> None:
        """All micro-batches, forward and back."""
        self.model.train()
        self.model.zero_grad_buffer()
        forward_backward_no_pipelining(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=self.config.data.sequence_length,
            micro_batch_size=self.config.data.micro_batch_size,
            pg_collection=self.groups.pg_collection,
        )


class PlainStep(PlainModel):
    """A whole step, with the update of the weights."""

    def __init__(self, config: Config, groups: Groups) -> None:
        super().__init__(config, groups)
        self.optimizer = build_optimizer(config, [self.model], groups.pg_collection)
        self._seconds: dict[str, list[float]] = {"forward_backward": [], "optimizer": []}

    def __call__(self, batches: list[dict[str, Any]]) -> None:
        self.optimizer.zero_grad()
        start = self._now()
        self.forward_backward(batches)
        middle = self._now()
        self.optimizer.prepare_grads()
        groups, sharded = self.groups, self.config.parallel.zero == 1
        norm = gradient_norm(self.optimizer, groups.pg_collection, groups.device, sharded=sharded)
        clip_gradients(self.optimizer, norm, self.config.optim.clip_norm)
        self.optimizer.step_with_ready_grads()
        self._seconds["forward_backward"].append(middle - start)
        self._seconds["optimizer"].append(self._now() - middle)

    def phases(self) -> dict[str, float]:
        """Median seconds of the later half of the steps."""
        return {
            name: sorted(values[len(values) // 2 :])[len(values) // 4]
            for name, values in self._seconds.items()
        }

    def _now(self) -> float:
        if self.groups.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def plain_config(config: Config, cuda: bool, **changes: Any) -> TransformerConfig:
    """The same shape in megatron-core's words, with `changes` to its fields."""
    model, parallel = config.model, config.parallel
    dtype = DTYPES[model.dtype]
    experts = bool(model.num_experts)
    shared: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "ffn_hidden_size": model.dense_ffn_size,
        "num_moe_experts": model.num_experts or None,
        "moe_ffn_hidden_size": model.expert_ffn_size if experts else None,
        "moe_router_topk": model.top_k,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": model.num_shared_experts * model.expert_ffn_size,
        "moe_layer_freq": [int(layer >= model.num_dense_layers) for layer in range(model.num_layers)],
        "moe_grouped_gemm": cuda,
        "moe_permute_fusion": cuda,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": cuda,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": not cuda,
        "expert_model_parallel_size": parallel.expert.size,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": cuda,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "cuda_graph_modules": [],
    }
    if recomputes(config, LAYER):
        shared |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    shared |= changes
    if not cuda:
        return TransformerConfig(**shared)
    return MLATransformerConfig(
        **shared,
        moe_latent_size=model.latent_size if experts else None,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.qk_nope_head_dim,
        qk_pos_emb_head_dim=model.qk_extra_head_dim,
        v_head_dim=model.v_head_dim,
        rope_type="rope",
    )


def _forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(iterator)
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    length, mask = tokens.shape[1], None
    if tokens.device.type == "cpu":
        # The local attention would build its own causal mask on "cuda".
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    losses = model(tokens, positions, mask, labels=batch["labels"])
    return losses, partial(_loss, mask=batch["loss_mask"])


def _loss(losses: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    return (losses.float() * mask).sum(), mask.sum().int(), {}

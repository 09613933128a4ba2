"""megatron-core's own GPTModel of the shape of a k3train configuration: a baseline of benchmarks."""

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
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec as spec_with_variant,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from k3train.activation_policy import LAYER, recomputes
from k3train.config import Config
from k3train.flops import BACKWARD_OVER_FORWARD, KDA_CHUNK
from k3train.model.transformer_config import DTYPES
from k3train.optim.build import build_optimizer
from k3train.optim.clip import clip_gradients, gradient_norm
from k3train.shapes import layer_kinds
from parallel.groups import Groups


class PlainModel:
    """Forward and backward of one step, by megatron-core alone. No pipeline."""

    def __init__(self, config: Config, groups: Groups, **changes: Any) -> None:
        """`changes`: fields of megatron-core's configuration."""
        self.config, self.groups = config, groups
        cuda = groups.device.type == "cuda"
        settings = plain_config(config, cuda, **changes)
        settings.finalize_model_grads_func = finalize_model_grads
        if settings.experimental_attention_variant is None:
            spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=cuda, vp_stage=None)
        else:
            spec = spec_with_variant(settings, vp_stage=None)
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
        self.flops_per_token = plain_flops_per_token(config, settings)
        """Of forward and backward, by the conventions of `k3train.flops`."""
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

    def __init__(self, config: Config, groups: Groups, **changes: Any) -> None:
        super().__init__(config, groups, **changes)
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


def settings_to_try(config: Config, cuda: bool, attention: str) -> dict[str, dict[str, Any]]:
    """Changes to `plain_config` by name, of which the fastest may count; `attention`: mla or gdn."""
    model = config.model
    if not cuda:
        # As many active FLOPs as k3train's experts, which are narrower outside.
        return {
            "local": {"moe_ffn_hidden_size": model.expert_ffn_size * model.latent_size // model.hidden_size}
        }
    variant: dict[str, Any] = {}
    if attention == "gdn":
        variant = {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "kda") for kind, _ in layer_kinds(model)],
            "linear_num_key_heads": model.num_heads,
            "linear_num_value_heads": model.num_heads,
            "linear_key_head_dim": model.kda_head_dim,
            "linear_value_head_dim": model.kda_head_dim,
            "linear_conv_kernel_dim": model.short_conv_kernel_size,
        }
    fused = {
        "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "moe_router_fusion": True,
        "bias_dropout_fusion": True,
    }  # fmt: skip
    kept = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    selected = kept | {
        "recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm", "mla_up_proj"],
    }  # fmt: skip
    return {
        "as k3train recomputes": variant,
        "as k3train recomputes, fused": variant | fused,
        "selective recompute, fused": variant | fused | selected,
        "nothing recomputed, fused": variant | fused | kept,
    }


def plain_flops_per_token(config: Config, settings: TransformerConfig) -> float:
    """FLOPs of forward and backward for one token, counted as `k3train.flops` does."""
    d = settings.hidden_size
    assert config.model.vocab_size is not None
    weights = d * config.model.vocab_size
    cores = 0.0
    pattern = get_linear_attention_pattern(settings)
    for layer in range(settings.num_layers):
        attention, core = (_delta_net if pattern[layer] else _softmax)(config, settings)
        weights, cores = weights + attention, cores + core
        is_moe = settings.num_moe_experts and settings.moe_layer_freq[layer]
        weights += _experts(settings) if is_moe else 3 * d * settings.ffn_hidden_size
    return (1 + BACKWARD_OVER_FORWARD) * (2.0 * weights + cores)


def _softmax(config: Config, settings: TransformerConfig) -> tuple[float, float]:
    """Weights, and FLOPs of the core, of a layer with MLA or plain attention."""
    d, heads, keys = settings.hidden_size, settings.num_attention_heads, config.data.sequence_length / 2
    if not isinstance(settings, MLATransformerConfig):
        channels = heads * settings.kv_channels
        return 4.0 * d * channels, 2 * keys * 2 * channels
    query, values = settings.qk_head_dim + settings.qk_pos_emb_head_dim, heads * settings.v_head_dim
    weights = (
        settings.q_lora_rank * (d + heads * query)
        + d * (settings.kv_lora_rank + settings.qk_pos_emb_head_dim)
        + settings.kv_lora_rank * (heads * settings.qk_head_dim + values)
        + values * d
    )
    return float(weights), 2 * keys * (heads * query + values)


def _delta_net(config: Config, settings: TransformerConfig) -> tuple[float, float]:
    """The same of Gated DeltaNet; its core in chunks costs what KDA's does."""
    d, heads, head = settings.hidden_size, settings.linear_num_value_heads, settings.linear_value_head_dim
    keys, values = settings.linear_num_key_heads * settings.linear_key_head_dim, heads * head
    weights = d * (2 * keys + 2 * values + 2 * heads) + values * d
    core = heads * (6 * head**2 + 3 * KDA_CHUNK * head + KDA_CHUNK**2)
    return float(weights), float(core + 2 * settings.linear_conv_kernel_dim * (2 * keys + values))


def _experts(settings: TransformerConfig) -> float:
    """Active weights of an MoE layer."""
    d, width = settings.hidden_size, settings.moe_ffn_hidden_size
    latent = settings.moe_latent_size or d
    projections = 2 * d * latent if settings.moe_latent_size else 0
    routed = settings.moe_router_topk * 3 * latent * width
    shared = 3 * d * (settings.moe_shared_expert_intermediate_size or 0)
    return float(d * settings.num_moe_experts + projections + routed + shared)


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

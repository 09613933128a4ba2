"""megatron-core's TransformerConfig, extended by what K3 adds and filled from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.moonep import EXACT, Codec
from parallel.moonep.transport import Transport

from ..config import Config, ExpertConfig, ModelConfig
from ..ops import grouped
from ..ops.backends import current_device
from ..quant.products import Multiply
from ..quant.qat import ExpertQuantiser

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class K3TransformerConfig(TransformerConfig):
    """TransformerConfig with the run's own sections beside it, so that modules read K3's names."""

    k3: ModelConfig = field(default_factory=ModelConfig)
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    expert_transport: Callable[[], Transport] | None = None
    """Gives the transport that all MoE layers share; a function, for megatron-core copies configurations."""
    expert_codec: Callable[[], Codec] = lambda: EXACT
    """Gives what the products of routed experts see of weights and rows; a function for the same reason."""
    expert_multiply: Callable[[], Multiply] = lambda: grouped.multiply
    """Gives the forward product of routed experts."""
    expert_pad: int = 1
    """With MoonEP the rows of each expert are rounded up to a multiple of this."""
    recompute_layers: int = 1
    """Decoder layers that are run again together, where the policy for site `layer` is to recompute."""
    logit_bound: float = 0.0
    """Attention logit above which Gated MLA keeps each head's largest; 0: nothing is kept."""


def transformer_config(config: Config) -> K3TransformerConfig:
    """Translate a resolved and validated configuration into megatron-core's."""
    model, parallel = config.model, config.parallel
    dtype = DTYPES[model.dtype]
    codec, multiply = _expert_products(config)
    pipelined = parallel.pipeline > 1
    interleaved = pipelined and parallel.virtual > 1
    return K3TransformerConfig(
        k3=model,
        experts=parallel.expert,
        expert_codec=lambda: codec,
        expert_multiply=lambda: multiply,
        recompute_layers=config.offload.recompute_layers,
        logit_bound=config.optim.qk_clip or 0.0,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        ffn_hidden_size=model.dense_ffn_size,
        num_moe_experts=model.num_experts or None,
        moe_ffn_hidden_size=model.expert_ffn_size if model.num_experts else None,
        moe_latent_size=model.latent_size if model.num_experts else None,
        moe_router_topk=model.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=False,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        # SiTU-GLU enters through the activation builder of the spec; megatron-core's own is never called.
        use_te_activation_func=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=model.init_std,
        # Parameters are initialised by name after construction, so that no layout changes a weight.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype if pipelined else None,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if interleaved else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert.size,
        expert_tensor_parallel_size=1,
        # With two ranks both directions of an interleaved pipeline meet the same peer, and a batched
        # exchange could not tell them apart.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cuda_graph_modules=[],
    )


def _expert_products(config: Config) -> tuple[Codec, Multiply]:
    """What products of routed experts see, and the forward product."""
    if config.quant.recipe == "none":
        return EXACT, grouped.multiply
    codec = ExpertQuantiser(config.quant, current_device().type, DTYPES[config.model.dtype])
    return codec, codec.multiply

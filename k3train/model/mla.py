"""Gated Multi-head Latent Attention without positional encoding.

Source: Kimi K3 report; DeepSeek-V2 for the latent compression. Shapes: s sequence, b batch, d hidden,
H heads, N nope width, X extra width, V value width. The extra channels of the keys are shared by all
heads and never rotated; the softmax scale counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from ..ops.attention import causal_attention
from ..ops.attention.largest_logit import largest_logits
from ..ops.packing import Packing
from .linear import column_linear, project, row_linear
from .norm import RMSNorm
from .transformer_config import K3TransformerConfig


@dataclass
class MLASubmodules:
    """Linear classes of the layer, by megatron-core's spec."""

    column_linear: type
    row_linear: type


class GatedMLA(MegatronModule):
    """MLA whose output is gated channel by channel by the input."""

    config: K3TransformerConfig
    largest_logit: Tensor

    def __init__(
        self,
        config: K3TransformerConfig,
        submodules: MLASubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        model = config.k3
        self.tp_group = pg_collection.tp
        heads = model.num_heads
        self.query_width = model.qk_nope_head_dim + model.qk_extra_head_dim
        self.scale = self.query_width**-0.5

        def column(inputs: int, outputs: int) -> nn.Module:
            return column_linear(submodules.column_linear, config, inputs, outputs, pg_collection.tp)

        self.q_a_proj = column(model.hidden_size, model.q_lora_rank)
        self.q_a_norm = RMSNorm(model.q_lora_rank, model.mla_norm_eps, config.params_dtype)
        self.q_b_proj = column(model.q_lora_rank, heads * self.query_width)
        self.kv_a_proj = column(model.hidden_size, model.kv_lora_rank + model.qk_extra_head_dim)
        self.kv_a_norm = RMSNorm(model.kv_lora_rank, model.mla_norm_eps, config.params_dtype)
        self.kv_b_proj = column(model.kv_lora_rank, heads * (model.qk_nope_head_dim + model.v_head_dim))
        self.g_proj = column(model.hidden_size, heads * model.v_head_dim)
        self.o_proj = row_linear(
            submodules.row_linear, config, heads * model.v_head_dim, model.hidden_size, pg_collection.tp
        )

        if config.logit_bound:
            # Of each head in the training steps since the last reset, as far as it is above the bound.
            self.register_buffer("largest_logit", torch.zeros(heads), persistent=False)

    def forward(self, hidden_states: Tensor, packing: Packing) -> Tensor:
        """Attend inside each document. hidden_states and result: [s, b, d]."""
        model = self.config.k3
        x = hidden_states.transpose(0, 1)  # [b, s, d]
        query = project(self.q_b_proj, self.q_a_norm(project(self.q_a_proj, x)))
        query = query.unflatten(-1, (model.num_heads, self.query_width))  # [b, s, H, N + X]
        latent, extra = project(self.kv_a_proj, x).split(
            (model.kv_lora_rank, model.qk_extra_head_dim), dim=-1
        )
        expanded = project(self.kv_b_proj, self.kv_a_norm(latent))
        expanded = expanded.unflatten(-1, (model.num_heads, -1))  # [b, s, H, N + V]
        nope, value = expanded.split((model.qk_nope_head_dim, model.v_head_dim), dim=-1)
        extra = extra.unsqueeze(2).expand(-1, -1, model.num_heads, -1)  # [b, s, H, X]
        key = torch.cat((nope, extra), dim=-1)
        # Under recompute only the second pass runs with gradients, so each token counts once.
        if self.config.logit_bound and self.training and torch.is_grad_enabled():
            self._keep_largest(query, key, packing)
        attended = causal_attention(
            query, key, value, scale=self.scale, packing=packing, backend=model.backends.attention
        )  # [b, s, H, V]
        gated = torch.sigmoid(project(self.g_proj, x)) * attended.flatten(2).to(x.dtype)
        return project(self.o_proj, gated).transpose(0, 1)

    def _keep_largest(self, query: Tensor, key: Tensor, packing: Packing) -> None:
        """Raise each head's largest logit of the step, where QK-Clip may need it; [b, s, H, N + X]."""
        seen = largest_logits(query, key, scale=self.scale, packing=packing, above=self.config.logit_bound)
        torch.maximum(self.largest_logit, seen, out=self.largest_logit)

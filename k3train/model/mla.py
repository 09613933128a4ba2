"""Gated Multi-head Latent Attention without positional encoding.

Source: Kimi K3 report; DeepSeek-V2 for the latent compression. Shapes: s sequence, b batch, d hidden,
H heads, N nope width, X extra width, V value width. The extra channels of the keys are shared by all
heads and never rotated; the softmax scale counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from offload.sites import region, site

from ..ops.attention import Fragments, causal_attention
from ..ops.attention.largest_logit import largest_logits
from ..ops.packing import Packing, Span
from .linear import column_linear, project, row_linear
from .memo import LayerMemo
from .mla_context import attend_across
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

    def forward(self, hidden_states: Tensor, packing: Packing, memo: LayerMemo | None = None) -> Tensor:
        """Attend inside each document. hidden_states and result: [s, b, d]; `memo`: see `LayerMemo`."""
        x = hidden_states.transpose(0, 1)  # [b, s, d]
        query_latent, key_latent = region("mla.input", self._project, x)
        memo = memo or LayerMemo()
        counts = bool(self.config.logit_bound) and self.training and torch.is_grad_enabled()
        counts = counts and not memo.has_logits
        if packing.span is None:
            query = region("mla.query", self._query, query_latent)
            key, value = region("mla.key", self._key_value, key_latent)
            attended = self._attended(counts, slice(None), packing, query, key, value)
        else:
            attended = self._attended_across(counts, packing.span, query_latent, key_latent)
        memo.has_logits = memo.has_logits or counts
        gate_logits = region("mla.gate_input", partial(project, self.g_proj), x)
        gated = region("mla.gate", self._gate, gate_logits, attended)
        with site("mla.output"):
            return project(self.o_proj, gated).transpose(0, 1)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """The latents of queries, and of keys and values, of x [b, s, d]."""
        return project(self.q_a_proj, x), project(self.kv_a_proj, x)

    def _query(self, latent: Tensor) -> Tensor:
        """[b, s, H, N + X]."""
        query = project(self.q_b_proj, self.q_a_norm(latent))
        return query.unflatten(-1, (self.config.k3.num_heads, self.query_width))

    def _key_value(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [b, s, H, N + X] and values [b, s, H, V]."""
        model = self.config.k3
        latent, extra = latent.split((model.kv_lora_rank, model.qk_extra_head_dim), dim=-1)
        expanded = project(self.kv_b_proj, self.kv_a_norm(latent))
        expanded = expanded.unflatten(-1, (model.num_heads, -1))  # [b, s, H, N + V]
        nope, value = expanded.split((model.qk_nope_head_dim, model.v_head_dim), dim=-1)
        extra = extra.unsqueeze(2).expand(-1, -1, model.num_heads, -1)  # [b, s, H, X]
        # A copy: kept as a view for backward, the values would hold the keys' part in memory.
        return torch.cat((nope, extra), dim=-1), value.contiguous()

    def _attended_across(self, counts: bool, span: Span, query_latent: Tensor, key_latent: Tensor) -> Tensor:
        """[b, s, H, V] of tokens whose rows a context group shares."""
        return attend_across(
            self.config.k3,
            span,
            region("mla.query", self.q_a_norm, query_latent),
            key_latent,
            self._normed_keys,
            (self.q_b_proj.get_parameter("weight"), self.kv_b_proj.get_parameter("weight")),
            partial(self._attended, counts),
        )

    def _normed_keys(self, latent: Tensor) -> Tensor:
        """The latent of keys and values with its norm, the extra channels as they are."""
        model = self.config.k3
        latent, extra = latent.split((model.kv_lora_rank, model.qk_extra_head_dim), dim=-1)
        return torch.cat((self.kv_a_norm(latent), extra), dim=-1)

    def _attended(
        self,
        counts: bool,
        heads: slice,
        packing: Packing | Fragments,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """[b, s, h, V] of these heads, whose largest logits count for QK-Clip or not."""
        if counts:
            self._keep_largest(heads, query, key, packing)
        return region("mla.core", partial(self._attend, packing), query, key, value)

    def _attend(self, packing: Packing | Fragments, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, s, H, V]."""
        backend = self.config.k3.backends.attention
        return causal_attention(query, key, value, scale=self.scale, packing=packing, backend=backend)

    def _gate(self, logits: Tensor, attended: Tensor) -> Tensor:
        """[b, s, H * V]."""
        return torch.sigmoid(logits) * attended.flatten(2).to(logits.dtype)

    def _keep_largest(self, heads: slice, query: Tensor, key: Tensor, packing: Packing | Fragments) -> None:
        """Raise each head's largest logit of the step, where QK-Clip may need it; [b, s, h, N + X]."""
        seen = largest_logits(query, key, scale=self.scale, packing=packing, above=self.config.logit_bound)
        largest = self.largest_logit[heads]
        torch.maximum(largest, seen, out=largest)

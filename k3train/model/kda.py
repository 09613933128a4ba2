"""Kimi Delta Attention: linear attention with a per-channel decay and the delta rule.

Source: Kimi K3 report, Kimi Linear (arXiv:2510.26692). Shapes: s sequence, b batch, d hidden,
H heads, D head width, C = H * D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from offload.sites import region, site

from ..ops.kda import delta_attention
from ..ops.packing import Packing
from ..ops.short_conv import short_convs
from .linear import column_linear, project, row_linear
from .memo import LayerMemo
from .norm import RMSNorm
from .transformer_config import K3TransformerConfig


@dataclass
class KDASubmodules:
    """Linear classes of the layer, by megatron-core's spec."""

    column_linear: type
    row_linear: type


class KimiDeltaAttention(MegatronModule):
    """KDA with short convolutions, a low-rank bounded decay and a full-rank output gate."""

    config: K3TransformerConfig

    def __init__(
        self,
        config: K3TransformerConfig,
        submodules: KDASubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        model = config.k3
        self.num_heads, self.head_dim = model.num_heads, model.kda_head_dim
        channels = self.num_heads * self.head_dim
        self.tp_group = pg_collection.tp

        def column(inputs: int, outputs: int) -> nn.Module:
            return column_linear(submodules.column_linear, config, inputs, outputs, pg_collection.tp)

        self.q_proj = column(model.hidden_size, channels)
        self.k_proj = column(model.hidden_size, channels)
        self.v_proj = column(model.hidden_size, channels)
        self.b_proj = column(model.hidden_size, self.num_heads)
        self.f_a_proj = column(model.hidden_size, self.head_dim)
        self.f_b_proj = column(self.head_dim, channels)
        self.g_proj = column(model.hidden_size, channels)
        self.o_proj = row_linear(submodules.row_linear, config, channels, model.hidden_size, pg_collection.tp)

        filters = (channels, 1, model.short_conv_kernel_size)
        self.q_conv, self.k_conv, self.v_conv = (self._fp32(*filters) for _ in range(3))
        self.A_log = self._fp32(self.num_heads)
        self.dt_bias = self._fp32(channels)
        self.o_norm = RMSNorm(self.head_dim, model.norm_eps, torch.float32)

    @staticmethod
    def _fp32(*shape: int) -> nn.Parameter:
        device = None if not torch.cuda.is_available() else torch.cuda.current_device()
        return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))

    def forward(self, hidden_states: Tensor, packing: Packing, memo: LayerMemo | None = None) -> Tensor:
        """Mix tokens of each document. hidden_states and result: [s, b, d]; `memo` is taken to match MLA."""
        x = hidden_states.transpose(0, 1)  # [b, s, d]
        qkv = region("kda.input", self._project, x)
        q, k, v = region("kda.qkv", partial(self._convolve, packing), *qkv)
        decay_logits, beta = region("kda.decay", self._decay, x)
        mixed = region("kda.core", partial(self._attend, packing), q, k, v, decay_logits, beta)
        gate_logits = region("kda.gate_input", partial(project, self.g_proj), x)
        gated = region("kda.gate", self._gate, gate_logits, mixed)
        with site("kda.output"):
            return project(self.o_proj, gated).transpose(0, 1)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of x [b, s, d] before their convolutions, [b, s, C] each."""
        return tuple(project(proj, x) for proj in (self.q_proj, self.k_proj, self.v_proj))

    def _convolve(self, packing: Packing, *qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v [b, s, C] to [b, s, H, D]."""
        filters = (self.q_conv, self.k_conv, self.v_conv)
        convolved = short_convs(qkv, filters, packing, backend=self.config.k3.backends.short_conv)
        return tuple(map(self._heads, convolved))

    def _decay(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Decay logits [b, s, H, D] and beta [b, s, H]."""
        logits = self._heads(project(self.f_b_proj, project(self.f_a_proj, x)))
        return logits, torch.sigmoid(project(self.b_proj, x).float())

    def _attend(
        self, packing: Packing, q: Tensor, k: Tensor, v: Tensor, decay_logits: Tensor, beta: Tensor
    ) -> Tensor:
        return delta_attention(
            q,
            k,
            v,
            decay_logits,
            beta,
            self.A_log,
            self.dt_bias,
            lower_bound=self.config.k3.gate_lower_bound,
            packing=packing,
            backend=self.config.k3.backends.kda,
        )

    def _gate(self, logits: Tensor, mixed: Tensor) -> Tensor:
        """Logits [b, s, C] and mixed [b, s, H, D] to the normed and gated [b, s, C]."""
        gate = torch.sigmoid(self._heads(logits))
        return (gate * self.o_norm(mixed).to(gate.dtype)).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

"""Stable LatentMoE: routed experts in a latent space beside shared experts at full width.

Source: Kimi K3 report; LatentMoE (arXiv:2601.18089). Shapes: s sequence, b batch, t = s * b tokens,
d hidden, l latent, n rows after dispatch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, ExpertsBuilder
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from ..ops.situ import situ_glu
from .linear import column_linear, project, row_linear
from .norm import RMSNorm
from .router import QuantileRouter
from .transformer_config import K3TransformerConfig


class SiTUGLU(nn.Module):
    """SiTU-GLU of [..., 2 f] into [..., f], for megatron-core's activation hook."""

    def __init__(self, *, config: K3TransformerConfig) -> None:
        super().__init__()
        self.beta, self.linear_beta = config.k3.situ_beta, config.k3.situ_linear_beta
        self.backend = config.k3.backends.situ

    def forward(self, gate_up: Tensor) -> Tensor:
        return situ_glu(gate_up, self.beta, self.linear_beta, backend=self.backend)


class GatedFFN(MLP):
    """megatron-core's MLP with SiTU-GLU, of an inner width of its own."""

    def __init__(
        self,
        config: K3TransformerConfig,
        submodules: MLPSubmodules,
        ffn_size: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        # MLP reads the inner width of its second projection from the configuration.
        own = copy.copy(config)
        own.ffn_hidden_size = ffn_size
        super().__init__(own, submodules, ffn_hidden_size=ffn_size, tp_group=pg_collection.tp)

    def forward(self, hidden_states: Tensor, valid: Tensor | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        """hidden_states [s, b, d] to [s, b, d]; `valid` is taken to match LatentMoE and not used."""
        return super().forward(hidden_states)


class SequentialExperts(SequentialMLP):
    """The local experts one after another; outputs are not weighted here."""

    def forward(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:  # type: ignore[override]
        """rows [n, l], sorted by expert, to [n, l]."""
        counts = rows_per_expert.tolist()
        gate_up = self._project("linear_fc1", rows, counts)
        # The activation has no weights: one call over all experts' rows instead of one each.
        return self._project("linear_fc2", self.local_experts[0].activation_func(gate_up), counts)

    def _project(self, linear: str, rows: Tensor, counts: list[int]) -> Tensor:
        pieces = rows.split(counts)
        experts = zip(self.local_experts, pieces, strict=True)
        return torch.cat([project(getattr(expert, linear), piece) for expert, piece in experts])


class GroupedExperts(TEGroupedMLP):
    """The local experts as Transformer Engine grouped GEMMs; outputs are not weighted here."""

    def forward(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:  # type: ignore[override]
        """rows [n, l], sorted by expert, to [n, l]."""
        counts = rows_per_expert.tolist()
        gate_up, _ = self.linear_fc1(rows, counts)
        output, _ = self.linear_fc2(self.activation_func(gate_up), counts)
        return output


class LatentDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all, with the weights applied to expert outputs where the token lives.

    K3 rounds each expert's output to the model's dtype, multiplies it by its FP32 weight after the down
    projection, and sums in FP32. Weights therefore never travel.
    """

    tokens_per_expert: Tensor

    def token_dispatch(self, rows: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange rows [t * k, l]; the second value stays where it is and only keeps the interface."""
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        received = all_to_all(self.ep_group, rows, self.output_splits, self.input_splits)
        return received, received.new_ones(received.shape[0])

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Weight and sum rows [t * k, l] into tokens [s, b, l], in FP32, then round once."""
        combined = unpermute(
            rows.float(),
            self.reversed_local_input_permutation_mapping,
            restore_shape=self.hidden_shape_before_permute,
            probs=self.probs,
            routing_map=self.routing_map,
        )
        return combined.to(rows.dtype).view(self.hidden_shape)


@dataclass
class LatentMoESubmodules:
    """Linear classes and builders of the layer, by megatron-core's spec."""

    column_linear: type
    row_linear: type
    experts: ExpertsBuilder
    shared_experts: MLPSubmodules


class LatentMoE(BaseMoELayer):
    """Router at full width; experts between a latent down and up projection; RMSNorm before the latter."""

    config: K3TransformerConfig

    def __init__(
        self,
        config: K3TransformerConfig,
        submodules: LatentMoESubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, layer_number, pg_collection)
        model = config.k3
        self.tp_group = pg_collection.tp
        self.router = QuantileRouter(config, pg_collection)
        self.router.set_layer_number(layer_number)
        self.latent_down = column_linear(
            submodules.column_linear, config, model.hidden_size, model.latent_size, pg_collection.tp
        )
        self.token_dispatcher = LatentDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=pg_collection
        )
        self.experts = submodules.experts(self.num_local_experts, config, pg_collection=pg_collection)
        self.latent_norm = RMSNorm(model.latent_size, model.norm_eps, config.params_dtype)
        self.latent_up = row_linear(
            submodules.row_linear, config, model.latent_size, model.hidden_size, pg_collection.tp
        )
        self.shared_experts = GatedFFN(
            config,
            submodules.shared_experts,
            model.num_shared_experts * model.expert_ffn_size,
            pg_collection,
        )

    def forward(self, hidden_states: Tensor, valid: Tensor | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        """hidden_states [s, b, d], valid [s, b] or None, to [s, b, d]; the None is megatron-core's bias."""
        probs, routing_map = self.router(hidden_states, valid)
        latent = project(self.latent_down, hidden_states)
        mixed = self.latent_norm(self._routed(latent, probs, routing_map))
        shared, _ = self.shared_experts(hidden_states)
        return shared + project(self.latent_up, mixed), None

    def _routed(self, latent: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        """Send latent [s, b, l] to its experts and bring the weighted sums back."""
        dispatcher = self.token_dispatcher
        rows, weights = dispatcher.dispatch_preprocess(latent, routing_map, probs)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, rows_per_expert, _ = dispatcher.dispatch_postprocess(rows, weights)
        rows = dispatcher.combine_preprocess(self.experts(rows, rows_per_expert))
        return dispatcher.combine_postprocess(dispatcher.token_combine(rows))

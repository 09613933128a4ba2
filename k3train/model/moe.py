"""Stable LatentMoE: routed experts in a latent space beside shared experts at full width.

Source: Kimi K3 report; LatentMoE (arXiv:2601.18089). Shapes: s sequence, b batch, d hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, ExpertsBuilder
from torch import Tensor

from offload.sites import region, site
from parallel.moonep.plan.place import dealt

from ..ops.backends import current_device
from .dispatch import BalancedDispatcher, build_dispatcher
from .experts import name_globally
from .linear import column_linear, project, row_linear
from .memo import LayerMemo
from .norm import RMSNorm
from .router import QuantileRouter, Routing
from .transformer_config import K3TransformerConfig


class GatedFFN(MLP):
    """megatron-core's MLP with SiTU-GLU, of an inner width of its own; `name` is that of its sites."""

    def __init__(
        self,
        config: K3TransformerConfig,
        submodules: MLPSubmodules,
        ffn_size: int,
        pg_collection: ProcessGroupCollection,
        name: str = "ffn",
    ) -> None:
        # MLP reads the inner width of its second projection from the configuration.
        own = copy.copy(config)
        own.ffn_hidden_size = ffn_size
        super().__init__(own, submodules, ffn_hidden_size=ffn_size, tp_group=pg_collection.tp)
        self.name = name

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, valid: Tensor | None = None, memo: LayerMemo | None = None
    ) -> tuple[Tensor, None]:
        """hidden_states [s, b, d] to [s, b, d]; `valid` and `memo` are taken to match LatentMoE."""
        gate_up = region(f"{self.name}.input", partial(project, self.linear_fc1), hidden_states)
        activated = region(f"{self.name}.activation", self.activation_func, gate_up)
        with site(f"{self.name}.output"):
            return project(self.linear_fc2, activated), None


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
        self.token_dispatcher = build_dispatcher(config, self.local_expert_indices, pg_collection)
        physical = torch.tensor(dealt(model.num_experts, self.ep_group.size()), device=current_device())
        self.register_buffer("physical", physical, persistent=False)
        self.register_buffer("logical", physical.argsort(), persistent=False)
        if isinstance(self.token_dispatcher, BalancedDispatcher):
            for name, memory in self.token_dispatcher.memory().items():
                self.register_buffer(f"policy_{name}", memory, persistent=name != "holders")
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
            name="moe.shared",
        )

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, valid: Tensor | None = None, memo: LayerMemo | None = None
    ) -> tuple[Tensor, None]:
        """hidden_states [s, b, d], valid [s, b] or None, to [s, b, d]; the None is megatron-core's bias.

        `memo`: the same in each pass over these tokens.
        """
        memo = memo or LayerMemo()
        choice, weights = region("moe.router", partial(self._route, valid, memo), hidden_states)
        planned: Any = self.token_dispatcher.plan(self.physical[choice], memo, counted=self.training)
        latent = region("moe.input", partial(project, self.latent_down), hidden_states)
        mixed, shared = self.token_dispatcher.mix(
            latent, planned, weights, self.experts, meanwhile=lambda: self.shared_experts(hidden_states)[0]
        )
        normed = region("moe.norm", self.latent_norm, mixed)
        with site("moe.output"):
            return shared + project(self.latent_up, normed), None

    def _route(self, valid: Tensor | None, memo: LayerMemo, hidden_states: Tensor) -> Routing:
        routing: Routing = self.router(hidden_states, valid, memo)
        return routing

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """megatron-core's description of every tensor, experts by their number in the whole model."""
        described: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        experts = {key: entry for key, entry in described.items() if key.startswith(f"{prefix}experts.")}
        name_globally(experts, self.config.k3.num_experts, self.ep_group.size())
        return described

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """A policy's loads by the expert's number in the whole model, the same in every layout."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in self._loads_by_place(destination, prefix):
            destination[key] = destination[key][self.physical]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        keys = self._loads_by_place(state_dict, prefix)
        own = {key: state_dict[key][self.logical.to(state_dict[key].device)] for key in keys}
        super()._load_from_state_dict({**state_dict, **own}, prefix, *rest)
        if isinstance(self.token_dispatcher, BalancedDispatcher):
            self.token_dispatcher.place_copies()

    def _loads_by_place(self, state: Mapping[str, Any], prefix: str) -> list[str]:
        return [key for name in ("loads", "placed") if (key := f"{prefix}policy_{name}") in state]

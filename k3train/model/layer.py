"""One decoder layer: two AttnRes sites around an attention and a feed-forward sublayer.

Shapes: s sequence, b batch, d hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from ..ops.packing import Packing
from .attn_res import AttentionResidual, ResidualState
from .norm import RMSNorm
from .router import RoutingMemo
from .transformer_config import K3TransformerConfig


@dataclass
class DecoderLayerSubmodules:
    """Specs of the two sublayers."""

    attention: ModuleSpec
    mlp: ModuleSpec


class DecoderLayer(MegatronModule):
    """Decoder layer `layer_index` (0-based, over the whole model)."""

    config: K3TransformerConfig

    def __init__(
        self,
        config: K3TransformerConfig,
        submodules: DecoderLayerSubmodules,
        layer_index: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        model = config.k3
        self.layer_index = layer_index
        self.starts_block = layer_index % model.attn_res_block_size == 0
        self.tp_group = pg_collection.tp
        self.attention_res = AttentionResidual(config)
        self.input_norm = RMSNorm(model.hidden_size, model.norm_eps, config.params_dtype)
        self.mlp_res = AttentionResidual(config)
        self.post_norm = RMSNorm(model.hidden_size, model.norm_eps, config.params_dtype)
        self.self_attention = build_module(submodules.attention, config=config, pg_collection=pg_collection)
        self.mlp = build_module(submodules.mlp, config=config, pg_collection=pg_collection)
        if layer_index == 0:
            # With one source there is nothing to mix: the site exists in checkpoints, but is never read.
            self.attention_res.requires_grad_(False)

    def forward(self, state: ResidualState, packing: Packing, valid: Tensor | None) -> ResidualState:
        """Advance the residual state by one layer; `valid` [s, b] is False for padding."""
        if self.config.k3.recompute == "layer" and self.training:
            memo = RoutingMemo()
            running = checkpoint(
                lambda *sources: self._running(sources, packing, valid, memo), False, *state.sources
            )
        else:
            running = self._running(state.sources, packing, valid)
        return ResidualState(state.sources if self.starts_block else state.bank, running)

    def _running(
        self,
        sources: tuple[Tensor, ...],
        packing: Packing,
        valid: Tensor | None,
        memo: RoutingMemo | None = None,
    ) -> Tensor:
        """The running sum after this layer, [s, b, d]; sources are the bank and the sum before it."""
        *bank, running = sources
        mixed = self.attention_res(sources) if bank else running
        attended = self.self_attention(self.input_norm(mixed), packing)
        if self.starts_block:
            bank, running = list(sources), attended
        else:
            running = running + attended
        output, _ = self.mlp(self.post_norm(self.mlp_res((*bank, running))), valid, memo)
        return running + output

"""One decoder layer: two AttnRes sites around an attention and a feed-forward sublayer.

Shapes: s sequence, b batch, d hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from offload.sites import named, region

from ..ops.packing import Packing
from .attn_res import AttentionResidual, ResidualState
from .memo import LayerMemo
from .norm import RMSNorm
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

    def kept(self, state: ResidualState) -> tuple[Tensor, ...]:
        """The bank behind this layer, [s, b, d] each: what `state` has of it already."""
        return state.sources if self.starts_block else state.bank

    def forward(
        self,
        state: ResidualState,
        packing: Packing,
        valid: Tensor | None,
        memo: LayerMemo | None = None,
    ) -> ResidualState:
        """Advance the residual state by one layer.

        Args:
            valid: [s, b], False for padding.
            memo: the same in each pass over these tokens.
        """
        memo = memo or LayerMemo()
        bank, running = self.kept(state), state.running
        named("attn_res.bank", *bank)
        attended = self.self_attention(
            region("attn_res.mix", self._read_first, *state.sources), packing, memo
        )
        running = attended if self.starts_block else running + attended
        mixed = region("attn_res.mix", self._read_second, *bank, running)
        output, _ = self.mlp(mixed, valid, memo)
        return ResidualState(bank, running + output)

    def _read_first(self, *sources: Tensor) -> Tensor:
        """What the attention reads of the sources, [s, b, d] each."""
        return self.input_norm(self.attention_res(sources) if len(sources) > 1 else sources[0])  # type: ignore[no-any-return]

    def _read_second(self, *sources: Tensor) -> Tensor:
        """What the feed-forward sublayer reads."""
        return self.post_norm(self.mlp_res(sources))  # type: ignore[no-any-return]

"""One pipeline chunk of the language model: embedding, decoder layers, output, as far as it holds them.

Shapes: s sequence, b batch, d hidden, v vocabulary.
"""

from __future__ import annotations

from typing import Any

from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from offload.sites import named, region, site

from ..ops.cross_entropy import token_losses
from ..ops.linear import local_modules
from ..ops.packing import Packing
from .attn_res import AttentionResidual, ResidualState
from .layer import DecoderLayer
from .linear import column_linear, project
from .memo import LayerMemo
from .moe import LatentMoE
from .mtp import MultiTokenPrediction, mtp_targets
from .norm import RMSNorm
from .spec import layer_submodules
from .transformer_config import K3TransformerConfig


class LanguageModelChunk(MegatronModule):
    """Decoder layers `layers` of the model; the first chunk embeds, the last one predicts.

    Parameter names carry the layer's index in the whole model, so that no two chunks share one.
    """

    config: K3TransformerConfig

    def __init__(
        self,
        config: K3TransformerConfig,
        layers: range,
        pg_collection: ProcessGroupCollection,
        *,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        model = config.k3
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        self.tp_group = pg_collection.tp
        self.pg_collection = pg_collection
        self.layer_range = layers
        self.pre_process, self.post_process = layers.start == 0, layers.stop == model.num_layers
        self.share_embeddings_and_output_weights = False
        self.inputs: list[Tensor] | list[None] = [None]

        if self.pre_process:
            self.embedding = VocabParallelEmbedding(
                model.vocab_size,
                model.hidden_size,
                init_method=config.init_method,
                config=config,
                tp_group=pg_collection.tp,
            )
        self.layers = nn.ModuleDict(
            {
                str(index): DecoderLayer(config, layer_submodules(model, index), index, pg_collection)
                for index in layers
            }
        )
        if self.post_process:
            self._build_output(pg_collection)
        self._mark_parameters()

    def _build_output(self, pg_collection: ProcessGroupCollection) -> None:
        model = self.config.k3
        assert model.vocab_size is not None, "the vocabulary has not been resolved"
        self.output_res = AttentionResidual(self.config)
        self.final_norm = RMSNorm(model.hidden_size, model.norm_eps, self.config.params_dtype)
        # The loss reads the weight itself: a linear that holds it in the model's dtype, as it is.
        column_cls = local_modules().column_parallel_linear()
        self.head = column_linear(
            column_cls, self.config, model.hidden_size, model.vocab_size, pg_collection.tp
        )
        if model.mtp_layers:
            self.mtp = MultiTokenPrediction(
                self.config, layer_submodules(model, model.num_layers), column_cls, pg_collection
            )

    def _mark_parameters(self) -> None:
        """Embedding and head belong to AdamW under Muon; megatron-core asks for this attribute."""
        for name in ("embedding", "head"):
            if hasattr(self, name):
                getattr(self, name).weight.is_embedding_or_output_parameter = True

    def set_input_tensor(self, input_tensor: list[Tensor] | list[None]) -> None:
        """Called by the schedule with the sources that the stage before gave, [s, b, d] each.

        The first chunk gets [features of the images [n, d]], or [None].
        """
        self.inputs = input_tensor

    def forward(
        self,
        tokens: Tensor,
        packing: Packing,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        valid: Tensor | None = None,
        image_positions: Tensor | None = None,
        logits_at: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the chunk on tokens [b, s].

        Args:
            image_positions: int64 [n], places in the flattened tokens that the images' features take.
            logits_at: int64 [n], places in the flattened tokens; without labels, logits of these alone.

        Returns:
            the sources of the next chunk, bank rows and running sum [s, b, d] each, or from the last chunk:
            logits [b, s, v] FP32 without labels, or [n, v] at `logits_at`; with labels [b, s], the loss of
            each token [b, s] FP32 and, with MTP, its loss and mask [b, s].
        """
        state = self._input_state(tokens, image_positions)
        valid_rows = None if valid is None else valid.transpose(0, 1)
        layers: list[Any] = list(self.layers.values())
        together = self.config.recompute_layers
        for first in range(0, len(layers), together):
            state = _advance(layers[first : first + together], state, packing, valid_rows)
        if not self.post_process:
            return state.sources
        mixed, normed = region("attn_res.mix", self._read_output, *state.sources)
        if labels is None:
            return self._logits(normed, logits_at)
        losses = region("head", self._token_losses, normed, labels)
        if not self.config.k3.mtp_layers:
            return (losses,)
        assert loss_mask is not None
        targets, mask = mtp_targets(labels, loss_mask, packing)
        with site("mtp"):
            features = self.mtp(mixed, state.bank[0], packing, valid_rows)
            return losses, region("head", self._token_losses, features, targets), mask

    def _input_state(self, tokens: Tensor, image_positions: Tensor | None) -> ResidualState:
        if not self.pre_process:
            *bank, running = self.inputs
            assert running is not None, "the pipeline sent no input"
            return ResidualState(tuple(row for row in bank if row is not None), running)
        embedded = self.embedding(tokens)  # [b, s, d]
        (features,) = self.inputs
        if features is not None:
            assert image_positions is not None
            flat = embedded.flatten(0, 1).index_copy(0, image_positions, features.to(embedded.dtype))
            embedded = flat.view_as(embedded)
        return ResidualState((), embedded.transpose(0, 1).contiguous())

    def _read_output(self, *sources: Tensor) -> tuple[Tensor, Tensor]:
        """The last mixture of the sources, [s, b, d] each, and its norm."""
        mixed = self.output_res(sources)
        return mixed, self.final_norm(mixed)

    def _logits(self, hidden_states: Tensor, places: Tensor | None) -> Tensor:
        """Of hidden_states [s, b, d]: [b, s, v], or [n, v] at places [n] of the flattened tokens."""
        rows = hidden_states.transpose(0, 1)
        if places is not None:
            rows = rows[places // rows.shape[1], places % rows.shape[1]]
        return project(self.head, rows).float()

    def _token_losses(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each token: hidden_states [s, b, d], labels [b, s] to [b, s] FP32."""
        backends = self.config.k3.backends
        losses = token_losses(
            hidden_states.flatten(0, 1),
            self.head.get_parameter("weight"),
            labels.transpose(0, 1).flatten(),
            backend=backends.cross_entropy,
            logits_mib=backends.logits_mib,
        )
        return losses.view(hidden_states.shape[:2]).transpose(0, 1).contiguous()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """megatron-core's description of every tensor; a ModuleDict alone would hide how experts are cut."""
        described: dict[str, Any] = {}
        for name, module in self.named_children():
            parts = module.items() if isinstance(module, nn.ModuleDict) else [("", module)]
            for index, part in parts:
                path = f"{prefix}{name}.{index}." if index else f"{prefix}{name}."
                described.update(sharded_state_dict_default(part, path, sharded_offsets, metadata))
        return described

    def moe_layers(self) -> list[tuple[str, LatentMoE]]:
        """Name and module of every MoE layer of this chunk, in the order of the forward pass."""
        named: list[tuple[str, Any]] = [(f"layer_{index}", layer.mlp) for index, layer in self.layers.items()]
        if self.post_process and self.config.k3.mtp_layers:
            named.append(("mtp", self.mtp.layer.mlp))
        return [(name, mlp) for name, mlp in named if isinstance(mlp, LatentMoE)]


def _advance(
    layers: list[DecoderLayer], state: ResidualState, packing: Packing, valid: Tensor | None
) -> ResidualState:
    """`state` behind some neighbouring layers, which may be run again together."""
    memos = [LayerMemo() for _ in layers]
    kept = layers[0].kept(state)
    known = len(kept)

    def run(*sources: Tensor) -> tuple[Tensor, ...]:
        after = ResidualState(sources[:-1], sources[-1])
        for layer, memo in zip(layers, memos, strict=True):
            after = layer(after, packing, valid, memo)
        return after.sources[known:]

    named("attn_res.bank", *kept)
    made = region("layer", run, *state.sources, keep_results=True)
    return ResidualState((*kept, *made[:-1]), made[-1])

"""Multi-token prediction: one more layer that predicts the token after the next.

Source: DeepSeek-V3 for the fusion of hidden state and next embedding; the Kimi K3 report trains one such
layer on the final AttnRes output. The layer has a plain residual stream and shares embedding and head.
The next token's embedding is read out of the AttnRes bank, whose first row it is, so that no copy of the
embedding, and no gradient of one, crosses the pipeline. Shapes: s sequence, b batch, d hidden.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from offload.sites import collective, region, site
from parallel.context.exchange import right_halo

from ..ops.packing import Packing
from .layer import DecoderLayerSubmodules
from .linear import column_linear, project
from .memo import LayerMemo
from .norm import RMSNorm
from .transformer_config import K3TransformerConfig


class PlainLayer(MegatronModule):
    """An attention and a feed-forward sublayer on an ordinary residual stream."""

    config: K3TransformerConfig

    def __init__(
        self,
        config: K3TransformerConfig,
        submodules: DecoderLayerSubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        model = config.k3
        self.tp_group = pg_collection.tp
        self.input_norm = RMSNorm(model.hidden_size, model.norm_eps, config.params_dtype)
        self.post_norm = RMSNorm(model.hidden_size, model.norm_eps, config.params_dtype)
        self.self_attention = build_module(submodules.attention, config=config, pg_collection=pg_collection)
        self.mlp = build_module(submodules.mlp, config=config, pg_collection=pg_collection)

    def forward(self, hidden_states: Tensor, packing: Packing, valid: Tensor | None) -> Tensor:
        """hidden_states [s, b, d] to [s, b, d]."""
        run = partial(self._run, packing, valid, LayerMemo())
        return region("layer", run, hidden_states, keep_results=True)

    def _run(self, packing: Packing, valid: Tensor | None, memo: LayerMemo, hidden_states: Tensor) -> Tensor:
        normed = region("norm", self.input_norm, hidden_states)
        hidden_states = hidden_states + self.self_attention(normed, packing, memo)
        output, _ = self.mlp(region("norm", self.post_norm, hidden_states), valid, memo)
        return hidden_states + output


class MultiTokenPrediction(MegatronModule):
    """Features for predicting token i + 2 at position i."""

    config: K3TransformerConfig

    def __init__(
        self,
        config: K3TransformerConfig,
        submodules: DecoderLayerSubmodules,
        column_cls: type,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        model = config.k3
        self.tp_group = pg_collection.tp
        self.embedding_norm = RMSNorm(model.hidden_size, model.norm_eps, config.params_dtype)
        self.hidden_norm = RMSNorm(model.hidden_size, model.norm_eps, config.params_dtype)
        self.proj = column_linear(
            column_cls, config, 2 * model.hidden_size, model.hidden_size, pg_collection.tp
        )
        self.layer = PlainLayer(config, submodules, pg_collection)
        self.final_norm = RMSNorm(model.hidden_size, model.norm_eps, config.params_dtype)

    def forward(
        self, hidden_states: Tensor, embeddings: Tensor, packing: Packing, valid: Tensor | None
    ) -> Tensor:
        """Head input [s, b, d] from the final mixture and the token embeddings, each [s, b, d].

        The row's last position has no next embedding and repeats its own; `mtp_targets` masks it.
        """
        fused = region("input", partial(self._fuse, packing), embeddings, hidden_states)
        with site("fusion"):
            hidden_states = project(self.proj, fused)
        return region("norm", self.final_norm, self.layer(hidden_states, packing, valid))

    def _fuse(self, packing: Packing, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        """[s, b, d] each to [s, b, 2 d]."""
        behind, span = embeddings[-1:], packing.span
        if span is not None:
            halo = collective(right_halo(embeddings, 1, span.starts, span.group, dim=0, name="mtp.embedding"))
            # Behind the row it is zero.
            behind = halo + behind if span.stop == span.starts[-1] else halo
        following = torch.cat((embeddings[1:], behind))
        return torch.cat((self.embedding_norm(following), self.hidden_norm(hidden_states)), dim=-1)


def mtp_targets(labels: Tensor, loss_mask: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Labels and mask of the token after the next, [b, s] each.

    Position i predicts labels[i + 1], if the token i + 1 lies in the same document: past a border the
    embedding that the layer reads says nothing of this document. Over a context group a small collective.
    """
    ids, label, mask = packing.document_ids, labels[:, -1:], torch.zeros_like(loss_mask[:, -1:])
    document = ids[:, -1:]
    if (span := packing.span) is not None:
        # In FP64 labels are exact, and one exchange serves both.
        firsts = torch.stack((labels[:, :1].double(), loss_mask[:, :1].double()))  # [2, b, 1]
        behind = right_halo(firsts, 1, span.starts, span.group, dim=2, name="mtp.labels")
        label, mask = behind[0].to(labels.dtype), behind[1].to(loss_mask.dtype)
        if span.stop < span.starts[-1]:
            document = span.whole.document_ids[:, span.stop : span.stop + 1]
    shifted = torch.cat((labels[:, 1:], label), dim=1)
    kept = torch.cat((loss_mask[:, 1:], mask), dim=1)
    same_document = torch.cat((ids[:, 1:], document), dim=1) == ids
    return shifted, kept * loss_mask * same_document

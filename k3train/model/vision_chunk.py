"""The vision tower as a model chunk of megatron-core: held whole by every pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from ..ops.items import Share
from ..vision_config import VisionConfig
from ..vision_shapes import PREFIX, Grid
from .transformer_config import K3TransformerConfig
from .vision import VisionModel


class VisionChunk(MegatronModule):
    """`VisionModel` under the name that its parameters have in the whole model."""

    config: K3TransformerConfig

    def __init__(
        self, config: K3TransformerConfig, vision: VisionConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        self.pipeline_rank = pg_collection.pp.rank()
        self.vision = VisionModel(vision, config.hidden_size, config.params_dtype)
        for parameter in self.parameters():
            parameter.shared = True  # type: ignore[attr-defined]

    def forward(self, patches: Tensor, grids: Sequence[Grid], share: Share | None = None) -> Tensor:
        """Features [n, d] of packed items; see `VisionModel.forward`."""
        features: Tensor = self.vision(patches, grids, share)[0]
        return features

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """megatron-core's description of every tensor; the first pipeline rank is the one that saves."""
        path = f"{prefix}{PREFIX}."
        described: dict[str, Any] = sharded_state_dict_default(self.vision, path, sharded_offsets, metadata)
        for tensor in described.values():
            tensor.replica_id = (self.pipeline_rank, *tensor.replica_id[1:])
        return described

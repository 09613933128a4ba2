"""QK-Clip: weights of a Gated MLA head whose attention logits grew too large are scaled down after a step.

Source: Kimi K2 report (MuonClip), kept by Kimi K3. With S the largest logit of a head in the step's batch and
gamma = min(1, tau / S), the head's own rows of queries and keys are scaled by sqrt(gamma), and its queries of
the extra channels, whose keys all heads share, by gamma: the logits shrink by gamma. Letters as in `shapes`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from ..config import ModelConfig
from ..model.decoder import LanguageModelChunk
from ..model.mla import GatedMLA
from .build import sub_optimizers


class QKClip:
    """The Gated MLA layers of this rank and the bound on their logits.

    Args:
        threshold: tau.
        group: the ranks that see other tokens with the same weights.
    """

    def __init__(
        self, models: list[LanguageModelChunk], threshold: float, group: dist.ProcessGroup | None
    ) -> None:
        self.threshold, self.group = threshold, group
        self.layers = [
            (name, module)
            for model in models
            for name, module in model.named_modules()
            if isinstance(module, GatedMLA)
        ]

    def reset(self) -> None:
        """Forget the logits seen so far."""
        for _, layer in self.layers:
            layer.largest_logit.zero_()

    @torch.no_grad()
    def prepare(self, optimizer: MegatronOptimizer) -> None:
        """Have the optimizer's next step scale the weights that need it; a collective over the group."""
        if not self.layers:
            return
        largest = torch.stack([layer.largest_logit for _, layer in self.layers])  # [layers, H]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        over = (largest > self.threshold).any(1).tolist()
        scales: dict[str, Tensor] = {}
        for (name, layer), seen, needed in zip(self.layers, largest, over, strict=True):
            if needed:
                scales |= row_scales(name, layer.config.k3, seen, self.threshold)
        for part in sub_optimizers(optimizer):
            if part.optimizer is not None:
                part.optimizer.row_scales = scales


def row_scales(name: str, model: ModelConfig, largest: Tensor, threshold: float) -> dict[str, Tensor]:
    """Factor of each row of a layer's two matrices, FP32, by their names; largest [H]."""
    gamma = torch.where(largest > threshold, threshold / largest, torch.ones_like(largest))
    own, extra, value = gamma.sqrt(), gamma, torch.ones_like(gamma)
    widths = {
        "q_b_proj": ((own, model.qk_nope_head_dim), (extra, model.qk_extra_head_dim)),
        "kv_b_proj": ((own, model.qk_nope_head_dim), (value, model.v_head_dim)),
    }
    return {
        f"{name}.{matrix}.weight": torch.cat(
            [factor[:, None].expand(-1, width) for factor, width in parts], dim=1
        ).flatten()
        for matrix, parts in widths.items()
    }

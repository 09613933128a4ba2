"""From merged patches of the vision tower to embeddings of the language model.

Source: Kimi K3's `patchmergerv2`. Letters: n tokens, m merge, d hidden of the tower, o width of the language
model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.utils import skip_init

from ..ops.backends import current_device
from ..vision_config import VisionConfig
from .norm import RMSNorm


def plain_linear(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    """A bias-free linear that every rank holds whole, left for `vision_init` to fill."""
    return skip_init(nn.Linear, inputs, outputs, bias=False, dtype=dtype, device=current_device())


class Projector(nn.Module):
    """Linear, GELU (erf), linear, RMSNorm."""

    def __init__(self, config: VisionConfig, out_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        merged = config.merge**2 * config.hidden_size
        # The released checkpoint numbers the two linears 0 and 2: an activation stands between them.
        self.proj = nn.ModuleDict(
            {"0": plain_linear(merged, merged, dtype), "2": plain_linear(merged, out_size, dtype)}
        )
        self.post_norm = RMSNorm(out_size, config.projector_norm_eps, dtype)

    def forward(self, merged: Tensor) -> Tensor:
        """merged [n, m * m * d] to [n, o]."""
        return self.post_norm(self.proj["2"](gelu(self.proj["0"](merged))))

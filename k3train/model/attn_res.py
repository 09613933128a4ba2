"""Block Attention Residuals: each sublayer reads a learned mixture of block sums, not a residual stream.

Source: Kimi K3 report; Attention Residuals (arXiv:2603.15031). The state between layers is a bank of
finished block sums (the first row is the token embedding) and the running sum of the current block.
Shapes: s sequence, b batch, d hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.attn_res import attn_res
from .transformer_config import K3TransformerConfig


@dataclass(frozen=True)
class ResidualState:
    """Depth state between decoder layers."""

    bank: tuple[Tensor, ...]  # each [s, b, d]
    running: Tensor  # [s, b, d]

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What the next AttnRes site reads: the bank, then the running sum."""
        return (*self.bank, self.running)


class AttentionResidual(nn.Module):
    """One AttnRes site: softmax over depth of a learned query against RMS-normalised sources."""

    def __init__(self, config: K3TransformerConfig) -> None:
        super().__init__()
        model = config.k3
        options = {"dtype": config.params_dtype, "device": None}
        if torch.cuda.is_available():
            options["device"] = torch.cuda.current_device()
        self.query = nn.Parameter(torch.zeros(model.hidden_size, **options))
        self.norm_weight = nn.Parameter(torch.ones(model.hidden_size, **options))
        self.eps = model.norm_eps
        self.backend = model.backends.attn_res

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        """Mix sources, each [s, b, d], into [s, b, d]."""
        return attn_res(sources, self.query, self.norm_weight, eps=self.eps, backend=self.backend)

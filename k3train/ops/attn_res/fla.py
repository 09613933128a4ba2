"""AttnRes through flash-linear-attention's fused kernels. Letters: L sources, d hidden."""

from __future__ import annotations

from collections.abc import Sequence

from fla.ops.attnres import fused_attnres
from torch import Tensor


def attn_res(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `ops.attn_res.attn_res`."""
    output: Tensor = fused_attnres(query, sources, norm_weight, rms_eps=eps)
    return output

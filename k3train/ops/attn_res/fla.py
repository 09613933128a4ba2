"""AttnRes through flash-linear-attention's fused kernels. Letters: L sources, d hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fla.ops.attnres import fused_attnres
from torch import Tensor

from ..tuning import fix_choices


def attn_res(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `ops.attn_res.attn_res`."""
    fix_choices(torch.cuda.get_device_capability(query.device))
    output: Tensor = fused_attnres(query, sources, norm_weight, rms_eps=eps)
    return output

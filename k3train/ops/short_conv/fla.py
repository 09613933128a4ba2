"""The short convolution through flash-linear-attention's Triton kernel.

Letters: b batch, s sequence, C channels, K kernel size.
"""

from __future__ import annotations

from fla.modules.causal_conv1d import causal_conv1d
from torch import Tensor

from ..packing import Packing


def short_conv(x: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """See `ops.short_conv.short_conv`."""
    taps = weight.squeeze(1)  # [C, K]
    if packing.whole_rows:
        output, _ = causal_conv1d(x, taps, activation="silu")
    else:
        flat = x.flatten(0, 1)[None]  # [1, b*s, C]
        output, _ = causal_conv1d(flat, taps, activation="silu", cu_seqlens=packing.cu_seqlens.long())
    return output.view(x.shape)

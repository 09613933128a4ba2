"""The short convolution as one `conv1d` per document.

Letters: b batch, s sequence, C channels, K kernel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import Packing


def short_conv(x: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """See `ops.short_conv.short_conv`."""
    C, _, K = weight.shape
    dtype = torch.promote_types(x.dtype, weight.dtype)
    documents = x.to(dtype).flatten(0, 1).split(packing.cu_seqlens.diff().tolist())
    outputs = [F.conv1d(F.pad(d.t(), (K - 1, 0)), weight.to(dtype), groups=C).t() for d in documents]
    return F.silu(torch.cat(outputs)).view_as(x).to(x.dtype)

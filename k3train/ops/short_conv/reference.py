"""The short convolution as one `conv1d` per document.

Letters: b batch, s sequence, C channels, K kernel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import Packing
from .halo import with_halo


def short_conv(x: Tensor, weight: Tensor, packing: Packing, halo: Tensor | None = None) -> Tensor:
    """See `ops.short_conv.short_conv`; `halo` [b, K - 1, C] are the columns before those of x."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    rows, ids = with_halo(x, packing.document_ids, halo)
    assert ids is not None
    outputs = [_row(*row, weight.to(dtype)) for row in zip(rows.to(dtype), ids, strict=True)]
    return F.silu(torch.stack(outputs)[:, -x.shape[1] :]).to(x.dtype)


def _row(x: Tensor, document_ids: Tensor, weight: Tensor) -> Tensor:
    """x [s, C], the documents of which are convolved apart."""
    C, _, K = weight.shape
    documents = x.split(torch.unique_consecutive(document_ids, return_counts=True)[1].tolist())
    outputs = [F.conv1d(F.pad(d.t(), (K - 1, 0)), weight, groups=C).t() for d in documents]
    return torch.cat(outputs)

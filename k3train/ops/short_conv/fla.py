"""The short convolution through flash-linear-attention's Triton kernel.

Letters: b batch, s sequence, C channels, K kernel size, n fragments of documents.
"""

from __future__ import annotations

import torch
from fla.modules.causal_conv1d import causal_conv1d
from torch import Tensor

from ..packing import Packing


def short_conv(x: Tensor, weight: Tensor, packing: Packing, halo: Tensor | None = None) -> Tensor:
    """See `ops.short_conv.short_conv`; `halo` [b, K - 1, C] are the columns before those of x."""
    taps = weight.squeeze(1)  # [C, K]
    history = None if halo is None else _history(halo, packing)
    if packing.whole_rows:
        output, _ = causal_conv1d(x, taps, initial_state=history, activation="silu")
    else:
        flat = x.flatten(0, 1)[None]  # [1, b*s, C]
        output, _ = causal_conv1d(
            flat, taps, initial_state=history, activation="silu", cu_seqlens=packing.cu_seqlens_int64
        )
    return output.view(x.shape)


def _history(halo: Tensor, packing: Packing) -> Tensor:
    """What stands before each fragment: a row's halo before its first one, else zeros. [n, C, K]

    The kernel's states are K wide and their first column is never read.
    """
    rows = torch.nn.functional.pad(halo.transpose(1, 2), (1, 0))  # [b, C, K]
    if packing.whole_rows:
        return rows
    b, s = packing.document_ids.shape
    starts = torch.arange(0, b * s, s, dtype=torch.int32, device=halo.device)
    fragments = rows.new_zeros(packing.cu_seqlens.numel() - 1, *rows.shape[1:])
    return fragments.index_copy(0, torch.searchsorted(packing.cu_seqlens, starts), rows)

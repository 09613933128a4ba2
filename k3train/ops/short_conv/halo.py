"""Columns before a rank's own that the short convolution looks at, when a context group shares the rows.

Letters: b batch, s sequence, C channels, h columns of a halo, n tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.sites import collective
from parallel.context.exchange import left_halo

from ..packing import Packing

HALO = "short_conv.halo"
"""Name of the exchange in `parallel.context.exchange.traffic`."""


def halos(xs: Sequence[Tensor], columns: int, packing: Packing) -> Sequence[Tensor | None]:
    """Of each x [b, s, C] the columns before this rank's [b, h, C]; zero where they are of another document.

    One exchange for all, which have one shape. None each when there is nothing to fetch.
    """
    span = packing.span
    if span is None or columns == 0:
        return [None] * len(xs)
    tails = torch.stack([x[:, -columns:] for x in xs], dim=1)  # [b, n, at most h, C]
    before = collective(left_halo(tails, columns, span.starts, span.group, dim=2, name=HALO))
    same = before_start(span.whole.document_ids, span.start, columns)[:, None, :, None]
    return torch.where(same, before, 0).unbind(1)


def before_start(document_ids: Tensor, start: int, columns: int) -> Tensor:
    """Which of the columns before column `start` [b, h] are of its document; document_ids [b, S]."""
    found = document_ids[:, max(start - columns, 0) : start] == document_ids[:, start, None]
    missing = columns - found.shape[1]
    return torch.nn.functional.pad(found, (missing, 0))


def with_halo(x: Tensor, document_ids: Tensor | None, halo: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and its document ids behind the halo, whose columns count to the first document of x."""
    if halo is None:
        return x, document_ids
    if document_ids is not None:
        document_ids = torch.cat((document_ids[:, :1].expand(-1, halo.shape[1]), document_ids), dim=1)
    return torch.cat((halo, x), dim=1), document_ids

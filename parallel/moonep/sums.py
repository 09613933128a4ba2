"""Weighted sums over lists of rows, in a fixed order and wide arithmetic.

Letters: n rows, w their width, m list entries, p lists.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which rows of `dtype` are summed: FP32, or FP64 for FP64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_rows(
    rows: Tensor, entries: Tensor, offsets: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sum the rows of each list: output[i] = sum of weights[j] rows[entries[j]] over its j.

    Those are offsets[i] <= j < offsets[i + 1]. Products and sums are FP32 (FP64 for FP64 rows), added in the
    order of j, so re-runs are bit equal; rounded once to `dtype`. No autograd.

    Args:
        rows: [n, w].
        entries: int64 [m].
        offsets: int64 [p + 1], ascending from 0 to m.
        weights: [m] FP32 (FP64), or None for ones.
        dtype: of the output [p, w].
    """
    if rows.is_cuda:
        from .sums_triton import sum_rows as kernel

        return kernel(rows, entries, offsets, weights, dtype)
    return _reference(rows, entries, offsets, weights, dtype)


def _reference(
    rows: Tensor, entries: Tensor, offsets: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    lists = offsets.numel() - 1
    list_of = torch.repeat_interleave(torch.arange(lists), offsets.diff(), output_size=entries.numel())
    terms = rows[entries].to(wide(rows.dtype))  # [m, w]
    if weights is not None:
        terms *= weights[:, None]
    # On a CPU index_add_ goes through its index in order.
    return terms.new_zeros(lists, rows.shape[1]).index_add_(0, list_of, terms).to(dtype)

"""`sums.sum_rows` as one Triton kernel: a program walks one list for a block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def sum_rows(
    rows: Tensor, entries: Tensor, offsets: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See `sums.sum_rows`."""
    rows = rows.contiguous()
    lists, width = offsets.numel() - 1, rows.shape[1]
    output = torch.empty(lists, width, dtype=dtype, device=rows.device)
    if output.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _kernel[(lists, triton.cdiv(width, block))](
            rows, entries, offsets, rows if weights is None else weights, output, width,
            WEIGHTED=weights is not None, DOUBLE=rows.dtype == torch.float64, BLOCK=block,
        )  # fmt: skip
    return output


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    rows, entries, offsets, weights, output, width,
    WEIGHTED: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    total = tl.zeros([BLOCK], dtype=kind)
    begin, end = tl.load(offsets + place), tl.load(offsets + place + 1)
    for j in range(begin, end):
        row = tl.load(entries + j)
        term = tl.load(rows + row * width + column, mask=inside, other=0.0).to(kind)
        if WEIGHTED:
            term = term * tl.load(weights + j).to(kind)
        total += term
    tl.store(output + place * width + column, total.to(output.dtype.element_ty), mask=inside)

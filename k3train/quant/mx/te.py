"""Forward products of rounded rows and weights on tensor cores for MX blocks, through Transformer Engine.

Both operands go to MXFP8 E4M3 on the way and lose nothing. Transformer Engine's scale is the smallest power
of two under which a block's largest magnitude stays within 448, so at most the scale that the block was
rounded with; and an element of E4M3 or E2M1, multiplied by one or a larger power of two that keeps it within
448, is an element of E4M3. So the product sees the numbers that `fake_quantise` gave.

Not run on such a device yet, which is why `trial` multiplies before the verifier takes it. Letters: n rows,
i inputs, o outputs of a weight [o, i].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.grouped import Segments
from ..formats import BLOCK, MXFP4, MXFP8_E4M3
from . import reference

WRONG = 4e-3
"""Relative error, by norm, that BF16 outputs of right products keep within."""


class Library(NamedTuple):
    """What is used of Transformer Engine."""

    quantise: Callable[[Tensor], Any]
    """A weight [o, i] to MXFP8, scaled along i."""
    split: Callable[[Tensor, list[int]], Sequence[Any]]
    """Rows [n, i] to one MXFP8 tensor for each group."""
    multiply: Callable[[Sequence[Any], Sequence[Any], Tensor, list[int]], object]
    """Weights and rows of each group into one output [n, o]."""


def multiply(rows: Tensor, weights: Sequence[Tensor], segments: Segments, *, backend: str = "auto") -> Tensor:
    """x W^T for each group: BF16 rows [n, i] and weights [o, i], rounded to E4M3 or E2M1 blocks, to [n, o].

    `backend` is that of products in BF16, which `ops.grouped.multiply` takes too; nothing to choose here.
    """
    filled, library = segments.filled, _library()
    if not filled:
        return rows.new_empty(rows.shape[0], weights[0].shape[0])
    counts = [segments.counts[group] for group in filled]
    # Transformer Engine wants whole blocks of rows, also where it scales along the inputs.
    splits = [-(-count // BLOCK) * BLOCK for count in counts]
    places = None if splits == counts else _places(counts, splits, rows.device)
    spread = (
        rows if places is None else rows.new_zeros(sum(splits), rows.shape[1]).index_copy_(0, places, rows)
    )
    output = rows.new_empty(sum(splits), weights[0].shape[0])
    with torch.no_grad():
        left = [library.quantise(weights[group]) for group in filled]
        library.multiply(left, library.split(spread, splits), output, splits)
    return output if places is None else output.index_select(0, places)


def trial() -> str | None:
    """Why products on this device are not to be trusted, or None: a small one against FP64."""
    made = torch.Generator().manual_seed(0)
    rows = reference.fake_quantise(torch.randn(72, 128, generator=made), MXFP8_E4M3)
    weights = reference.fake_quantise(torch.randn(3, 64, 128, generator=made), MXFP4)
    counts = [40, 0, 32]
    pieces = rows.double().split(counts)
    expected = torch.cat([piece @ weight.double().t() for piece, weight in zip(pieces, weights, strict=True)])
    try:
        seen = [weight.bfloat16().cuda() for weight in weights]
        found = multiply(rows.bfloat16().cuda(), seen, Segments.of(counts, "cuda")).cpu().double()
    except Exception as error:  # a library built for other devices raises nearly anything
        return f"a trial product failed: {error}".splitlines()[0]
    wrong = ((found - expected).norm() / expected.norm()).item()
    return None if wrong <= WRONG else f"a trial product is off by {wrong:.1e} of its norm"


def _places(counts: Sequence[int], splits: Sequence[int], device: torch.device) -> Tensor:
    """Where the rows of each group lie once each is rounded up: int64 [n]."""
    places, start = [], 0
    for count, split in zip(counts, splits, strict=True):
        places.append(torch.arange(start, start + count))
        start += split
    return torch.cat(places).to(device, non_blocking=True)


@cache
def _library() -> Library:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    quantiser = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    quantiser.internal = True

    def split(rows: Tensor, splits: list[int]) -> Sequence[Any]:
        found: Sequence[Any] = tex.split_quantize(rows, splits, [quantiser.copy() for _ in splits])
        return found

    def multiply(left: Sequence[Any], right: Sequence[Any], output: Tensor, splits: list[int]) -> object:
        how = {"single_output": True, "m_splits": splits, "use_split_accumulator": False}
        return general_grouped_gemm(left, right, [output], [None] * len(left), output.dtype, **how)

    return Library(quantiser.quantize, split, multiply)

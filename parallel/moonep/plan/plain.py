"""The reference behind the interface of the other backends: tensors in, tensors out, lists between."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .types import Tables, stay


def fill(counts: Tensor) -> Tensor:
    """See `backends.Backend.fill`. Only the loads [E] and the moves, about R of them, go through lists."""
    load = counts.sum(0, dtype=torch.int32)
    alloc = stay(load, counts.shape[0])
    if moves := reference.moves(load.tolist(), counts.shape[0]):
        expert, destination, rows = torch.tensor(moves, dtype=torch.int32, device=counts.device).t()
        home = expert // (counts.shape[1] // counts.shape[0])
        alloc[destination, expert] = rows
        alloc.index_put_((home, expert), -rows, accumulate=True)
    return alloc


def lay_out(
    alloc: Tensor, counts: Tensor, choice: Tensor, rank: int, pad: int, stride: int
) -> tuple[Tables, Tensor, Tensor]:
    """See `backends.Backend.lay_out`."""
    device, wanted, offered = alloc.device, alloc.tolist(), counts.tolist()
    layout = reference.tables(wanted, offered, pad)
    rows, first = reference.rows(choice.tolist(), offered, wanted, layout.starts, rank, stride)
    tables = Tables(*(torch.tensor(each, dtype=torch.int32, device=device) for each in layout))
    return (
        tables,
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(first, dtype=torch.bool, device=device),
    )

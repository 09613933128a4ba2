"""Differentiable exchanges between the ranks of a context group; backward is the mirror of forward.

A row's columns (its tokens) are cut into one share for each rank, in the order of the ranks; `starts` are the
columns at which shares start, and the row's length: N + 1 numbers for N ranks, which every rank knows. All
ranks of a group call each function in the same order. Sums are taken in the order of the ranks, in FP32 or
wider, so that runs repeat bit for bit.

Letters: N ranks, n rows of a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

traffic: Counter[str] = Counter()
"""Bytes that this rank gave to exchanges of each name, forward; backward under the name + `.backward`."""


def even(length: int, ranks: int) -> tuple[int, ...]:
    """`starts` of equal shares; `length` is a multiple of `ranks`."""
    assert length % ranks == 0, f"{length} columns over {ranks} ranks"
    return tuple(range(0, length + 1, length // ranks))


def gather_columns(
    x: Tensor, starts: Sequence[int], group: dist.ProcessGroup, *, dim: int, name: str
) -> Tensor:
    """All ranks' shares joined along `dim`. Backward: the sum of what all ranks say of this rank's share."""
    rows: Tensor = _Gather.apply(x.movedim(dim, 0), tuple(starts), group, name)
    return rows.movedim(0, dim)


def left_halo(
    x: Tensor, k: int, starts: Sequence[int], group: dist.ProcessGroup, *, dim: int, name: str
) -> Tensor:
    """The `k` columns before this rank's share along `dim`; zeros before the row's first column."""
    lengths = _lengths(starts)
    tails = _fit(x.movedim(dim, 0), k, at_end=True)
    gathered: Tensor = _Gather.apply(tails, even(k * len(lengths), len(lengths)), group, name)
    parts, missing = [], k
    for rank in range(dist.get_rank(group) - 1, -1, -1):
        taken = min(missing, lengths[rank], k)
        parts.append(gathered[(rank + 1) * k - taken : (rank + 1) * k])
        missing -= taken
    halo = torch.cat([gathered.new_zeros(missing, *gathered.shape[1:]), *reversed(parts)])
    return _attached(halo, gathered).movedim(0, dim)


def right_halo(
    x: Tensor, k: int, starts: Sequence[int], group: dist.ProcessGroup, *, dim: int, name: str
) -> Tensor:
    """The `k` columns behind this rank's share along `dim`; zeros behind the row's last column."""
    lengths = _lengths(starts)
    heads = _fit(x.movedim(dim, 0), k, at_end=False)
    gathered: Tensor = _Gather.apply(heads, even(k * len(lengths), len(lengths)), group, name)
    parts, missing = [], k
    for rank in range(dist.get_rank(group) + 1, len(lengths)):
        taken = min(missing, lengths[rank], k)
        parts.append(gathered[rank * k : rank * k + taken])
        missing -= taken
    halo = torch.cat([*parts, gathered.new_zeros(missing, *gathered.shape[1:])])
    return _attached(halo, gathered).movedim(0, dim)


def exchange_rows(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup, *, name: str
) -> Tensor:
    """x [n, ...], blocks of `send[rank]` rows for each rank, to blocks of `receive[rank]` rows from each.

    Backward sends the gradients back.
    """
    received: Tensor = _Exchange.apply(x, tuple(send), tuple(receive), group, name)
    return received


class _Gather(torch.autograd.Function):
    """Along the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, starts: tuple[int, ...], group: dist.ProcessGroup, name: str) -> Tensor:
        ctx.starts, ctx.group, ctx.name = starts, group, name
        lengths = _lengths(starts)
        assert x.shape[0] == lengths[dist.get_rank(group)], (x.shape, starts)
        traffic[name] += x.numel() * x.element_size()
        longest = max(lengths)
        share = _fit(x, longest, at_end=False).contiguous()
        joined = share.new_empty(longest * len(lengths), *x.shape[1:])
        dist.all_gather_into_tensor(joined, share, group=group)
        if min(lengths) == longest:
            return joined
        return torch.cat([joined[rank * longest :][:length] for rank, length in enumerate(lengths)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lengths = _lengths(ctx.starts)
        own = lengths[dist.get_rank(ctx.group)]
        said = _all_to_all(grads[0], lengths, [own] * len(lengths), ctx.group, f"{ctx.name}.backward")
        wide = torch.promote_types(said.dtype, torch.float32)
        total = torch.zeros(own, *said.shape[1:], dtype=wide, device=said.device)
        for part in said.split(own) if own else ():
            total += part
        return total.to(said.dtype), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        send: tuple[int, ...],
        receive: tuple[int, ...],
        group: dist.ProcessGroup,
        name: str,
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.name = send, receive, group, name
        return _all_to_all(x, send, receive, group, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = _all_to_all(grads[0], ctx.receive, ctx.send, ctx.group, f"{ctx.name}.backward")
        return back, None, None, None, None


def _all_to_all(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup, name: str
) -> Tensor:
    assert x.shape[0] == sum(send), (x.shape, send)
    kept = send[dist.get_rank(group)]
    traffic[name] += (sum(send) - kept) * x[:1].numel() * x.element_size()
    received = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group)
    return received


def _lengths(starts: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(starts)]


def _fit(x: Tensor, rows: int, *, at_end: bool) -> Tensor:
    """x cut or filled up with zeros to `rows`, what is kept or given standing at the end or at the start."""
    kept = min(rows, x.shape[0])
    part = x[x.shape[0] - kept :] if at_end else x[:kept]
    if kept == rows:
        return part
    zeros = x.new_zeros(rows - kept, *x.shape[1:])
    return torch.cat((zeros, part) if at_end else (part, zeros))


def _attached(halo: Tensor, gathered: Tensor) -> Tensor:
    """`halo` with `gathered` in its graph even where nothing of it was taken: backward is a collective."""
    return halo + gathered[:0].sum() if gathered.requires_grad else halo

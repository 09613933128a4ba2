"""The planner as tensor operations, on CPU or GPU, without waiting for the device.

Letters: R ranks, E experts, P = E/R, N = S * K entries of this rank, G = 2P. The loops of steps B and C have
fixed lengths: at most R - 1 fills, and P + R - 1 moves of each home rank, all home ranks at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import plain
from .types import Tables, at_home


def fill(counts: Tensor) -> Tensor:
    """See `backends.Backend.fill`."""
    # A CPU has no device to wait for, and plain integers are ten times faster there.
    return plain.fill(counts) if counts.device.type == "cpu" else fill_on_device(counts)


def fill_on_device(counts: Tensor) -> Tensor:
    """`fill` in loops of fixed length."""
    ranks, experts = counts.shape
    load = counts.sum(0, dtype=torch.int32).view(ranks, -1)  # [R, P]
    quota = _donations(load.sum(1, dtype=torch.int32))
    alloc = _split(load, quota)  # [home, destination, P]
    return alloc.transpose(0, 1).reshape(ranks, experts)


def _donations(load: Tensor) -> Tensor:
    """Step B: loads [R] of home ranks to the rows that each gives to each, [R, R]."""
    ranks = load.shape[0]
    rank = torch.arange(ranks, device=load.device)
    total = load.sum(dtype=torch.int32)
    balance = load - total // ranks - (rank < total % ranks).int()
    quota = load.new_zeros(ranks, ranks)
    for _ in range(ranks - 1):
        donor = rank == balance.argmax()  # the first of equals
        receiver = rank == balance.argmin()
        rows = -balance.amin()  # 0 once all are balanced
        quota += rows * (donor[:, None] & receiver)
        balance += rows * (receiver.int() - donor.int())
    return quota


def _split(load: Tensor, quota: Tensor) -> Tensor:
    """Step C: loads [R, P] and quotas [home, destination] to alloc [home, destination, P]."""
    ranks, places = load.shape
    left, quota = load.clone(), quota.clone()
    alloc = load.new_zeros(ranks, ranks, places)
    place = torch.arange(places, device=load.device)
    rank = torch.arange(ranks, device=load.device)
    for _ in range(places + ranks - 1 if ranks > 1 else 0):
        at = quota.argmax(1)[:, None] == rank  # [R, R]
        largest = left.argmax(1)[:, None] == place  # [R, P]
        rows = torch.minimum(quota.amax(1), left.amax(1))[:, None]
        alloc += (at * rows)[:, :, None] * largest[:, None, :]
        quota -= at * rows
        left -= largest * rows
    alloc.diagonal().add_(left.t())
    return alloc


def lay_out(
    alloc: Tensor, counts: Tensor, choice: Tensor, rank: int, pad: int, stride: int
) -> tuple[Tables, Tensor, Tensor]:
    """See `backends.Backend.lay_out`."""
    before = counts.cumsum(0) - counts  # [R, E] entries of lower source ranks, int64
    slots, ends, starts = _segments(alloc, pad)
    tables = Tables(slots, ends, starts, _send(alloc, counts, before))
    number = before[rank][choice.flatten()] + _ordinal(choice.flatten(), alloc.shape[1])
    rows, destination = _rows(alloc, starts, choice.flatten(), number, stride)
    return tables, rows, _first(destination.view(choice.shape)).flatten()


def _segments(alloc: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Step D: slots [R, P], ends [R, G], starts [R, E]."""
    ranks, experts = alloc.shape
    places = experts // ranks
    expert = torch.arange(experts, device=alloc.device)
    rank = torch.arange(ranks, device=alloc.device)[:, None]
    remote = (alloc > 0) & (expert // places != rank)
    # Unused slots sort behind every expert.
    order = torch.where(remote, expert, experts).sort(1).values[:, :places]
    used = order < experts
    held = alloc.gather(1, order.clamp(max=experts - 1)) * used
    rows = torch.cat([at_home(alloc), held], 1)  # [R, G]
    padded = -(-rows // pad) * pad
    ends = padded.cumsum(1, dtype=torch.int32)
    begin = torch.where(rows > 0, ends - padded, 0)
    starts = alloc.new_zeros(ranks, experts + 1)  # one column takes what unused slots write
    starts.scatter_(1, order, begin[:, places:])
    starts.scatter_(1, expert.view(ranks, places), begin[:, :places])
    return torch.where(used, order, -1).int(), ends, starts[:, :experts].contiguous()


def _send(alloc: Tensor, counts: Tensor, before: Tensor) -> Tensor:
    """[R, R] overlap of the intervals that sources offer with those that destinations take, over experts."""
    taken = alloc.cumsum(0)
    low, high = taken - alloc, taken  # [R, E]
    pairs = [  # one source at a time: the product over all would be [R, R, E]
        (torch.minimum(high, first + count) - torch.maximum(low, first)).clamp(min=0).sum(1)
        for first, count in zip(before, counts, strict=True)
    ]
    return torch.stack(pairs).int()


def _ordinal(expert: Tensor, experts: int) -> Tensor:
    """How many earlier entries of [N] chose the same expert."""
    order = expert.argsort(stable=True)
    ordered = expert[order]
    positions = torch.arange(expert.numel(), device=expert.device)
    begin = torch.searchsorted(ordered, torch.arange(experts, device=expert.device, dtype=expert.dtype))
    return torch.empty_like(positions).scatter_(0, order, positions - begin[ordered])


def _rows(
    alloc: Tensor, starts: Tensor, expert: Tensor, number: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Step E: row and destination, int64 [N], of entries that are `number` among all of their expert."""
    ranks = alloc.shape[0]
    # Ends of the intervals of (expert, destination) when all experts stand one behind the other.
    ends = alloc.t().flatten().cumsum(0)  # [E * R]
    offset = torch.cat([ends.new_zeros(1), ends[ranks - 1 :: ranks]])[:-1]  # [E]
    at = torch.searchsorted(ends, number + offset[expert], right=True)
    destination = at - expert * ranks
    begin = (ends - alloc.t().flatten())[at] - offset[expert]
    row = starts.t().flatten()[at] + number - begin
    return destination * stride + row, destination


def _first(destination: Tensor) -> Tensor:
    """[S, K] to whether no earlier k of the token goes to the same destination."""
    k = destination.shape[1]
    same = destination[:, :, None] == destination[:, None, :]  # [S, K, K]
    earlier = torch.ones(k, k, dtype=torch.bool, device=destination.device).tril(-1)
    return ~(same & earlier).any(2)

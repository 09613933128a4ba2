"""The planner as Triton kernels: a serial one for steps B and C, and parallel ones for tables and rows.

Letters: R ranks, E experts, P = E/R, S tokens of this rank, K experts of a token, N = S * K entries, G = 2P.
Nothing waits for the device, so that a plan can be captured in a CUDA graph. Loops of the first kernel end
when nothing is left to do: at most R - 1 fills, and P + R - 1 moves of each home rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .types import Tables

COLUMNS = 16
"""Experts of a program that sums over ranks."""
ENTRIES, CHUNK = 128, 32
"""Entries of a block, compared pair by pair, and how many of them at a time; measured on an H200."""
LARGEST = tl.constexpr(2**31 - 1)


def fill(counts: Tensor) -> Tensor:
    """See `backends.Backend.fill`."""
    ranks, experts = counts.shape
    counts = counts.contiguous()
    load = counts.sum(0, dtype=torch.int32)
    alloc = torch.empty_like(counts)
    sizes = triton.next_power_of_2(ranks), triton.next_power_of_2(experts // ranks)
    _fill_kernel[(ranks,)](load, alloc, experts // ranks, ranks, *sizes, COLUMNS, num_warps=1)
    return alloc


@triton.jit
def _fill_kernel(load, alloc, P, R, ALL_R: tl.constexpr, ALL_P: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each home rank; all of them find the same donations."""
    home = tl.program_id(0)
    rank, place = tl.arange(0, ALL_R), tl.arange(0, ALL_P)
    column = tl.arange(0, COLUMNS)
    balance = tl.zeros((ALL_R,), tl.int32)
    for begin in range(0, P, COLUMNS):
        inside = (rank[:, None] < R) & (begin + column[None, :] < P)
        rows = tl.load(load + rank[:, None] * P + begin + column[None, :], mask=inside, other=0)
        balance += tl.sum(rows, 1)
        tl.store(alloc + rank[:, None] * R * P + home * P + begin + column[None, :], 0, mask=inside)
    total = tl.sum(balance, 0)
    balance = tl.where(rank < R, balance - total // R - (rank < total % R).to(tl.int32), 0)

    quota = tl.zeros((ALL_R,), tl.int32)
    most = tl.max(balance, 0)
    while most > 0:
        least = tl.min(balance, 0)
        donor = tl.min(tl.where(balance == most, rank, ALL_R), 0)
        receiver = tl.min(tl.where(balance == least, rank, ALL_R), 0)
        quota = tl.where((rank == receiver) & (donor == home), -least, quota)
        balance = tl.where(rank == donor, most + least, tl.where(rank == receiver, 0, balance))
        most = tl.max(balance, 0)

    left = tl.load(load + home * P + place, mask=place < P, other=0)
    tl.debug_barrier()  # zeros before rows
    open_rows = tl.max(quota, 0)
    while open_rows > 0:
        largest = tl.max(left, 0)
        receiver = tl.min(tl.where(quota == open_rows, rank, ALL_R), 0)
        expert = tl.min(tl.where(left == largest, place, ALL_P), 0)
        rows = tl.minimum(open_rows, largest)
        tl.store(alloc + receiver * R * P + home * P + expert, rows)
        quota = tl.where(rank == receiver, quota - rows, quota)
        left = tl.where(place == expert, left - rows, left)
        open_rows = tl.max(quota, 0)
    tl.store(alloc + home * R * P + home * P + place, left, mask=place < P)


def lay_out(
    alloc: Tensor, counts: Tensor, choice: Tensor, rank: int, pad: int, stride: int
) -> tuple[Tables, Tensor, Tensor]:
    """See `backends.Backend.lay_out`."""
    alloc, counts, choice = alloc.contiguous(), counts.contiguous(), choice.contiguous()
    ranks, experts = alloc.shape
    offered, taken = _running_sums(counts, alloc)
    slots, ends, starts = _segments(alloc, pad)
    send = alloc.new_empty(ranks, ranks)
    block = min(8, triton.next_power_of_2(ranks))
    _send_kernel[(ranks, triton.cdiv(ranks, block))](
        counts, offered, alloc, taken, send, experts, ranks, block, 128
    )
    rows, first = _rows(alloc, taken, starts, counts, offered, choice, rank, stride)
    return Tables(slots, ends, starts, send), rows, first


def _running_sums(counts: Tensor, alloc: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of [R, E] over the ranks up to each one, itself included."""
    ranks, experts = counts.shape
    sums = counts.new_empty(2, ranks, experts)
    _running_kernel[(triton.cdiv(experts, COLUMNS), 2)](
        counts, alloc, sums, experts, ranks, triton.next_power_of_2(ranks), COLUMNS
    )
    return sums[0], sums[1]


@triton.jit
def _running_kernel(counts, alloc, sums, E, R, ALL_R: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    which = tl.program_id(1)
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, ALL_R)
    inside = (rank[:, None] < R) & (expert[None, :] < E)
    at = rank[:, None] * E + expert[None, :]
    matrix = counts
    if which == 1:
        matrix = alloc
    rows = tl.load(matrix + at, mask=inside, other=0)
    tl.store(sums + which * R * E + at, tl.cumsum(rows, 0), mask=inside)


def _segments(alloc: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Step D: slots [R, P], ends [R, G], starts [R, E]."""
    ranks, experts = alloc.shape
    places = experts // ranks
    slots, ends = alloc.new_empty(ranks, places), alloc.new_empty(ranks, 2 * places)
    starts = torch.empty_like(alloc)
    sizes = min(1024, triton.next_power_of_2(places)), min(1024, triton.next_power_of_2(experts))
    _segments_kernel[(ranks,)](alloc, slots, ends, starts, experts, places, pad, *sizes)
    return slots, ends, starts


@triton.jit
def _segments_kernel(  # type: ignore[no-untyped-def]
    alloc, slots, ends, starts, E, P, pad, PLACES: tl.constexpr, EXPERTS: tl.constexpr
):
    rank = tl.program_id(0)
    alloc += rank * E
    starts += rank * E
    end, used = 0, 0
    for begin in range(0, P, PLACES):
        place = begin + tl.arange(0, PLACES)
        rows = tl.load(alloc + rank * P + place, mask=place < P, other=0)
        padded = (rows + pad - 1) // pad * pad
        own_end = end + tl.cumsum(padded, 0)
        tl.store(ends + rank * 2 * P + place, own_end, mask=place < P)
        tl.store(starts + rank * P + place, tl.where(rows > 0, own_end - padded, 0), mask=place < P)
        end += tl.sum(padded, 0)
    for begin in range(0, E, EXPERTS):
        expert = begin + tl.arange(0, EXPERTS)
        away = (expert < E) & (expert // P != rank)
        rows = tl.load(alloc + expert, mask=away, other=0)
        remote = rows > 0
        padded = (rows + pad - 1) // pad * pad
        slot = used + tl.cumsum(remote.to(tl.int32), 0) - 1
        slot_end = end + tl.cumsum(padded, 0)
        tl.store(slots + rank * P + slot, expert, mask=remote)
        tl.store(ends + rank * 2 * P + P + slot, slot_end, mask=remote)
        tl.store(starts + expert, tl.where(remote, slot_end - padded, 0), mask=away)
        end += tl.sum(padded, 0)
        used += tl.sum(remote.to(tl.int32), 0)
    for begin in range(0, P, PLACES):
        slot = begin + tl.arange(0, PLACES)
        unused = (slot >= used) & (slot < P)
        tl.store(slots + rank * P + slot, -1, mask=unused)
        tl.store(ends + rank * 2 * P + P + slot, end, mask=unused)


@triton.jit
def _send_kernel(  # type: ignore[no-untyped-def]
    counts, offered, alloc, taken, send, E, R, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):
    """Overlap of what a source offers of each expert with what some destinations take, over all experts."""
    source = tl.program_id(0)
    rank = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, E, EXPERTS):
        expert = begin + tl.arange(0, EXPERTS)
        last = tl.load(offered + source * E + expert, mask=expert < E, other=0)
        count = tl.load(counts + source * E + expert, mask=expert < E, other=0)
        at = rank[:, None] * E + expert[None, :]
        inside = (rank[:, None] < R) & (expert[None, :] < E)
        high = tl.load(taken + at, mask=inside, other=0)
        low = high - tl.load(alloc + at, mask=inside, other=0)
        overlap = tl.minimum(high, last[None, :]) - tl.maximum(low, (last - count)[None, :])
        entries += tl.sum(tl.maximum(overlap, 0), 1)
    tl.store(send + source * R + rank, entries, mask=rank < R)


def _rows(
    alloc: Tensor,
    taken: Tensor,
    starts: Tensor,
    counts: Tensor,
    offered: Tensor,
    choice: Tensor,
    rank: int,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """Steps E and F: rows int64 and first bool [N]."""
    (ranks, experts), (tokens, k) = alloc.shape, choice.shape
    entries = choice.numel()
    rows = torch.empty(entries, dtype=torch.int64, device=alloc.device)
    first = torch.empty(entries, dtype=torch.bool, device=alloc.device)
    if not entries:
        return rows, first
    earlier, blocks = _ordinals(choice, experts)
    all_k = triton.next_power_of_2(k)
    block = max(1, min(256, 4096 // all_k**2))
    _rows_kernel[(triton.cdiv(tokens, block),)](
        alloc, taken, starts, counts[rank], offered[rank], choice, earlier, blocks, rows, first,
        stride, tokens, k, experts, ranks, ENTRIES, (ranks - 1).bit_length(), block, all_k,
    )  # fmt: skip
    return rows, first


def _ordinals(choice: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Earlier entries of an expert: in the block of each entry [N], and before each block [blocks, E]."""
    entries = choice.numel()
    count = triton.cdiv(entries, ENTRIES)
    earlier = torch.empty(entries, dtype=torch.int32, device=choice.device)
    blocks = torch.zeros(count, experts, dtype=torch.int32, device=choice.device)
    _earlier_kernel[(count,)](choice, earlier, blocks, entries, experts, ENTRIES, CHUNK)
    _before_blocks_kernel[(triton.cdiv(experts, COLUMNS),)](
        blocks, count, experts, min(512, triton.next_power_of_2(count)), COLUMNS
    )
    return earlier, blocks


@triton.jit
def _earlier_kernel(choice, earlier, blocks, N, E, ENTRIES: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compares every pair of a block, which keeps the order that counting with atomics would lose."""
    begin = tl.program_id(0) * ENTRIES
    entry = begin + tl.arange(0, ENTRIES)
    expert = tl.load(choice + entry, mask=entry < N, other=-1).to(tl.int32)
    found = tl.zeros((ENTRIES, CHUNK), tl.int32)
    for chunk in range(0, ENTRIES, CHUNK):
        other = begin + chunk + tl.arange(0, CHUNK)
        chosen = tl.load(choice + other, mask=other < N, other=-1).to(tl.int32)
        same = (expert[:, None] == chosen[None, :]) & (other[None, :] < entry[:, None])
        found += same.to(tl.int32)
    tl.store(earlier + entry, tl.sum(found, 1), mask=entry < N)
    # How many there are does not depend on the order.
    tl.atomic_add(blocks + tl.program_id(0) * E + expert, 1, mask=entry < N, sem="relaxed")


@triton.jit
def _before_blocks_kernel(blocks, count, E, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turns the entries of each block into those of all blocks before it."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(0, count, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        inside = (block[:, None] < count) & (expert[None, :] < E)
        at = block[:, None] * E + expert[None, :]
        entries = tl.load(blocks + at, mask=inside, other=0)
        tl.store(blocks + at, before[None, :] + tl.cumsum(entries, 0) - entries, mask=inside)
        before += tl.sum(entries, 0)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    alloc, taken, starts, own_counts, own_offered, choice, earlier, blocks, rows, first,
    stride, S, K, E, R, ENTRIES: tl.constexpr, LOG_R: tl.constexpr, BLOCK: tl.constexpr, ALL_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, ALL_K)
    inside = (token[:, None] < S) & (k[None, :] < K)
    entry = token[:, None] * K + k[None, :]
    expert = tl.load(choice + entry, mask=inside, other=0).to(tl.int32)
    number = tl.load(earlier + entry, mask=inside, other=0)
    number += tl.load(blocks + entry // ENTRIES * E + expert, mask=inside, other=0)
    number += tl.load(own_offered + expert, mask=inside, other=0)
    number -= tl.load(own_counts + expert, mask=inside, other=0)

    destination = tl.zeros_like(expert)  # the first rank whose running sum exceeds the number
    for half in tl.static_range(LOG_R):
        step = (1 << LOG_R) >> (half + 1)
        probe = destination + step - 1
        known = tl.load(taken + probe * E + expert, mask=inside & (probe < R), other=LARGEST)
        destination = tl.where(known <= number, destination + step, destination)
    at = destination * E + expert
    row = number - tl.load(taken + at, mask=inside, other=0) + tl.load(alloc + at, mask=inside, other=0)
    row += tl.load(starts + at, mask=inside, other=0)
    tl.store(rows + entry, destination.to(tl.int64) * stride + row, mask=inside)

    same = destination[:, :, None] == destination[:, None, :]
    before = k[None, None, :] < k[None, :, None]
    repeated = tl.max((same & before).to(tl.int32), 2)
    tl.store(first + entry, repeated == 0, mask=inside)

"""Who orthogonalises which block, and what has to travel for it; imports no torch.

Under ZeRO the flat gradient of a chunk is cut into equal shards, one a data-parallel rank, wherever the cuts
fall. A block that lies inside one shard needs no exchange. One across a border gets one owner, to which the
other ranks send their pieces and which sends the pieces of the update back. Where whole matrices pile up in
one shard, a block that costs more to compute than to send may have an owner that holds nothing of it.

Positions are flat elements: `start` and `stop` of a matrix, `at` of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .groups import newton_schulz_flops

GATHER_BYTES = 4
"""An element on its way to the owner: FP32, as it stands in the shard."""
RETURN_BYTES = 2
"""An element of the update: Newton-Schulz ends in BF16, so nothing is lost."""
WORTH_SENDING = 1e4
"""FLOPs for each byte moved from which on a block may leave the rank that holds it: what a GPU computes in
the time in which its network port moves a byte."""
BATCH_ELEMENTS = 1 << 26
"""Most elements in one batch of blocks."""


@dataclass(frozen=True)
class Span:
    """A part of a matrix, and the rank in whose shard it lies."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """A block of matrix number `matrix`, with its parts by rank in ascending order."""

    matrix: int
    start: int
    stop: int
    shape: tuple[int, int]
    pieces: tuple[Span, ...]

    def held(self, rank: int) -> int:
        """Elements that lie in a rank's shard."""
        return sum(piece.stop - piece.start for piece in self.pieces if piece.rank == rank)


@dataclass(frozen=True)
class Copy:
    """Elements of blocks of one shape, in this rank's shard, and their place in a buffer."""

    matrix: int
    start: int
    stop: int
    at: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class Arrival:
    """Elements received from another rank: where in its messages, how many, and their place in the batch."""

    received: int
    size: int
    at: int


@dataclass(frozen=True)
class Batch:
    """Blocks of one shape that a rank orthogonalises together."""

    shape: tuple[int, int]
    count: int
    local: tuple[Copy, ...]
    remote: tuple[Arrival, ...]


@dataclass(frozen=True)
class Exchange:
    """One rank's part in the update of one model chunk."""

    batches: tuple[Batch, ...]
    leaving: tuple[Copy, ...]
    """What other ranks own, by its place in the messages, which are ordered by owner."""
    sent: tuple[int, ...]
    """Elements to each rank; the update's pieces come back in the same sizes."""
    received: tuple[int, ...]
    moved: int
    """Elements that any rank of the group sends to an owner: the same number on all of them."""


def spans(offset: int, numel: int, shard: int) -> list[Span]:
    """Parts of a matrix that begins at `offset` in a flat buffer cut into shards of `shard` elements."""
    first, last = offset // shard, (offset + numel - 1) // shard
    return [
        Span(rank, max(rank * shard - offset, 0), min((rank + 1) * shard - offset, numel))
        for rank in range(first, last + 1)
    ]


def cut(
    matrix: int, blocks: Sequence[tuple[int, int, tuple[int, int]]], parts: Sequence[Span]
) -> list[Block]:
    """The blocks of a matrix, as `groups.Split.blocks` lists them, with the parts they have in each shard."""
    return [
        Block(
            matrix,
            start,
            stop,
            shape,
            tuple(
                Span(part.rank, max(part.start, start), min(part.stop, stop))
                for part in parts
                if part.start < stop and start < part.stop
            ),
        )
        for start, stop, shape in blocks
    ]


def assign(blocks: Sequence[Block], loads: list[float], steps: int) -> list[int]:
    """Owner of each block; adds the FLOPs of each to `loads`, which has an entry for each rank.

    What is cheap to compute stays where it lies. The rest goes, largest first, to the rank that holds most of
    it among those that stay within the mean load, or else to one with the least.
    """
    flops = [newton_schulz_flops(block.shape, steps) for block in blocks]
    owners = [-1] * len(blocks)
    for index, block in enumerate(blocks):
        if len(block.pieces) == 1 and not _worth_sending(block, flops[index]):
            owners[index] = block.pieces[0].rank
            loads[owners[index]] += flops[index]
    free = [index for index, owner in enumerate(owners) if owner < 0]
    mean = (sum(loads) + sum(flops[index] for index in free)) / len(loads)
    for index in sorted(free, key=lambda index: (-flops[index], index)):
        owners[index] = _owner(blocks[index], flops[index], loads, mean)
        loads[owners[index]] += flops[index]
    return owners


def _worth_sending(block: Block, flops: float) -> bool:
    return flops >= WORTH_SENDING * (GATHER_BYTES + RETURN_BYTES) * (block.stop - block.start)


def _owner(block: Block, flops: float, loads: list[float], mean: float) -> int:
    most = max(mean, min(loads) + flops)
    allowed = [rank for rank, load in enumerate(loads) if load + flops <= most]
    return min(allowed, key=lambda rank: (-block.held(rank), loads[rank], rank))


def travelling(blocks: Sequence[Block], owners: Sequence[int]) -> Iterator[tuple[int, Span, int]]:
    """(number of the block, piece, owner) of all that crosses ranks, in the order of the messages."""
    for index, (block, owner) in enumerate(zip(blocks, owners, strict=True)):
        for piece in block.pieces:
            if piece.rank != owner:
                yield index, piece, owner


def exchange(
    blocks: Sequence[Block], owners: Sequence[int], rank: int, ranks: int, limit: int = BATCH_ELEMENTS
) -> Exchange:
    """What `rank` does for a chunk; `limit` is the most elements in a batch."""
    sent, received, moved = [0] * ranks, [0] * ranks, 0
    for _, piece, owner in travelling(blocks, owners):
        size = piece.stop - piece.start
        moved += size
        if piece.rank == rank:
            sent[owner] += size
        elif owner == rank:
            received[piece.rank] += size
    places = _Places(sent), _Places(received)
    leaving: list[Copy] = []
    arriving: dict[tuple[int, int], int] = {}
    for index, piece, owner in travelling(blocks, owners):
        size = piece.stop - piece.start
        if piece.rank == rank:
            at = places[0].take(owner, size)
            leaving.append(_copy(blocks[index], piece, at))
        elif owner == rank:
            arriving[index, piece.start] = places[1].take(piece.rank, size)
    mine = [index for index, owner in enumerate(owners) if owner == rank]
    batches = tuple(_batch(blocks, part, arriving) for part in _by_shape(blocks, mine, limit))
    return Exchange(batches, tuple(_joined(leaving)), tuple(sent), tuple(received), moved)


class _Places:
    """Next free place of each rank's part of a buffer."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.next = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def take(self, rank: int, size: int) -> int:
        self.next[rank] += size
        return self.next[rank] - size


def _by_shape(blocks: Sequence[Block], chosen: list[int], limit: int) -> Iterator[list[int]]:
    """`chosen` in lists of one shape each, none of more than `limit` elements unless it is one block."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index in chosen:
        shapes.setdefault(blocks[index].shape, []).append(index)
    for (rows, columns), members in shapes.items():
        size = max(1, limit // (rows * columns))
        yield from (members[first : first + size] for first in range(0, len(members), size))


def _batch(blocks: Sequence[Block], members: list[int], arriving: dict[tuple[int, int], int]) -> Batch:
    shape = blocks[members[0]].shape
    local, remote = [], []
    for slot, index in enumerate(members):
        block = blocks[index]
        for piece in block.pieces:
            at = slot * shape[0] * shape[1] + piece.start - block.start
            place = arriving.get((index, piece.start))
            if place is None:
                local.append(_copy(block, piece, at))
            else:
                remote.append(Arrival(place, piece.stop - piece.start, at))
    return Batch(shape, len(members), tuple(_joined(local)), tuple(remote))


def _copy(block: Block, piece: Span, at: int) -> Copy:
    return Copy(block.matrix, piece.start, piece.stop, at, block.shape)


def _joined(copies: list[Copy]) -> Iterator[Copy]:
    """Neighbours in the matrix that are neighbours in the buffer too, as one."""
    held: Copy | None = None
    for copy in copies:
        if held is not None and _follows(held, copy):
            held = replace(held, stop=copy.stop)
            continue
        if held is not None:
            yield held
        held = copy
    if held is not None:
        yield held


def _follows(held: Copy, copy: Copy) -> bool:
    end = held.at + held.stop - held.start
    return (held.matrix, held.shape, held.stop, end) == (copy.matrix, copy.shape, copy.start, copy.at)

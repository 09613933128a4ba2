"""Owners of blocks: what stays, what travels, how many bytes, and that all arrives where it belongs."""

from __future__ import annotations

import random

import pytest

from k3train.optim.groups import Split, newton_schulz_flops
from k3train.optim.owners import (
    GATHER_BYTES,
    WORTH_SENDING,
    Block,
    Exchange,
    Span,
    assign,
    cut,
    exchange,
    spans,
    travelling,
)


def test_spans_follow_the_shards() -> None:
    assert spans(10, 25, 20) == [Span(0, 0, 10), Span(1, 10, 25)]
    assert spans(20, 20, 20) == [Span(1, 0, 20)]
    assert spans(5, 60, 20) == [Span(0, 0, 15), Span(1, 15, 35), Span(2, 35, 55), Span(3, 55, 60)]


def heads(offset: int, shard: int, count: int = 6, rows: int = 4, columns: int = 10) -> list[Block]:
    parts = spans(offset, count * rows * columns, shard)
    return cut(0, Split("heads", (rows,), count).blocks(columns), parts)


def test_a_border_between_heads_needs_no_exchange() -> None:
    blocks = heads(offset=0, shard=120)
    owners = assign(blocks, [0.0, 0.0], steps=5)
    assert owners == [0, 0, 0, 1, 1, 1]
    assert list(travelling(blocks, owners)) == []
    first, second = (exchange(blocks, owners, rank, 2) for rank in range(2))
    assert first.moved == second.moved == 0 and sum(first.sent) == sum(second.received) == 0
    (batch,) = second.batches
    assert (batch.count, len(batch.local), len(batch.remote)) == (3, 1, 0)
    assert (batch.local[0].start, batch.local[0].stop, batch.local[0].at) == (120, 240, 0)


def test_a_border_inside_a_head_moves_that_head_alone() -> None:
    blocks = heads(offset=0, shard=130)
    owners = assign(blocks, [0.0, 0.0], steps=5)
    # Head 3, elements 120 to 160: 10 of them are rank 0's.
    assert owners == [0, 0, 0, 1, 1, 1]
    parts = [exchange(blocks, owners, rank, 2) for rank in range(2)]
    assert [part.sent for part in parts] == [(0, 10), (0, 0)]
    assert [part.received for part in parts] == [(0, 0), (10, 0)]
    gathered = GATHER_BYTES * parts[0].moved
    whole_buffer = GATHER_BYTES * 260
    assert gathered == 40 and gathered / whole_buffer == pytest.approx(1 / 26)


def test_whole_matrices_spread_over_ranks_by_their_flops() -> None:
    """Eight equal matrices in the shard of rank 2 of 4: two for each rank."""
    shape = (2048, 4096)
    size = shape[0] * shape[1]
    assert newton_schulz_flops(shape, 5) < 6 * WORTH_SENDING * size
    big = (4096, 8192)
    blocks = [Block(number, 0, big[0] * big[1], big, (Span(2, 0, big[0] * big[1]),)) for number in range(8)]
    loads = [0.0] * 4
    owners = assign(blocks, loads, steps=5)
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(set(loads)) == 1
    cheap = [Block(number, 0, size, shape, (Span(2, 0, size),)) for number in range(8)]
    assert assign(cheap, [0.0] * 4, steps=5) == [2] * 8, "sending costs more than computing"


def test_loads_carry_over_to_the_next_chunk() -> None:
    big = (4096, 8192)
    size = big[0] * big[1]
    block = Block(0, 0, size, big, (Span(0, 0, size),))
    loads = [0.0] * 3
    owners = [assign([block], loads, steps=5)[0] for _ in range(3)]
    assert sorted(owners) == [0, 1, 2]


def simulate(parts: list[Exchange], shards: list[dict[int, list[float]]]) -> list[list[list[float]]]:
    """Run the messages on lists; what each rank's batches hold."""
    ranks = len(parts)
    outgoing = []
    for part, shard in zip(parts, shards, strict=True):
        buffer = [0.0] * sum(part.sent)
        for copy in part.leaving:
            size = copy.stop - copy.start
            buffer[copy.at : copy.at + size] = shard[copy.matrix][copy.start : copy.stop]
        outgoing.append(buffer)
    arrived = []
    for rank, part in enumerate(parts):
        buffer = []
        for source in range(ranks):
            start = sum(parts[source].sent[:rank])
            buffer += outgoing[source][start : start + parts[source].sent[rank]]
        assert len(buffer) == sum(part.received)
        arrived.append(buffer)
    held = []
    for part, shard, buffer in zip(parts, shards, arrived, strict=True):
        batches = []
        for batch in part.batches:
            flat = [-1.0] * (batch.count * batch.shape[0] * batch.shape[1])
            for copy in batch.local:
                flat[copy.at : copy.at + copy.stop - copy.start] = shard[copy.matrix][copy.start : copy.stop]
            for arrival in batch.remote:
                piece = buffer[arrival.received : arrival.received + arrival.size]
                flat[arrival.at : arrival.at + arrival.size] = piece
            batches.append(flat)
        held.append(batches)
    return held


@pytest.mark.parametrize("seed", range(4))
def test_every_block_arrives_whole_at_its_owner(seed: int) -> None:
    """Random matrices over four ranks: elements are numbered, so that a misplaced one shows."""
    draw, ranks = random.Random(seed), 4
    sizes = [(draw.randint(1, 4), draw.choice([(2,), (3, 5), (1,)]), draw.randint(1, 9)) for _ in range(12)]
    offset, blocks, parts_of = 0, [], []
    total = sum(times * sum(rows) * columns for times, rows, columns in sizes)
    shard = -(-total // ranks)
    for number, (times, rows, columns) in enumerate(sizes):
        numel = times * sum(rows) * columns
        parts = spans(offset, numel, shard)
        blocks += cut(number, Split("", rows, times).blocks(columns), parts)
        parts_of.append((parts, numel))
        offset += numel
    owners = assign(blocks, [0.0] * ranks, steps=5)
    # Some blocks go to ranks that hold nothing of them.
    owners = [draw.randrange(ranks) if draw.random() < 0.3 else owner for owner in owners]
    shards: list[dict[int, list[float]]] = [{} for _ in range(ranks)]
    for number, (parts, numel) in enumerate(parts_of):
        for part in parts:
            values = [float("nan")] * numel
            values[part.start : part.stop] = [1000.0 * number + i for i in range(part.start, part.stop)]
            shards[part.rank][number] = values
    exchanges = [exchange(blocks, owners, rank, ranks, limit=40) for rank in range(ranks)]
    assert len({part.moved for part in exchanges}) == 1
    found = [
        flat[start : start + batch.shape[0] * batch.shape[1]]
        for part, batches in zip(exchanges, simulate(exchanges, shards), strict=True)
        for batch, flat in zip(part.batches, batches, strict=True)
        for start in range(0, len(flat), batch.shape[0] * batch.shape[1])
    ]
    expected = [[1000.0 * b.matrix + i for i in range(b.start, b.stop)] for b in blocks]
    assert sorted(found) == sorted(expected)


def test_batches_stay_under_the_limit() -> None:
    blocks = heads(offset=0, shard=10_000, count=7)
    part = exchange(blocks, [0] * 7, 0, 1, limit=100)
    assert [batch.count for batch in part.batches] == [2, 2, 2, 1]
    assert [batch.count for batch in exchange(blocks, [0] * 7, 0, 1, limit=1).batches] == [1] * 7

"""What an operation waits for, what it sends and receives, and when each rank posts it. Imports no torch.

A `Message` crosses ranks; what stays on a rank is none. A program is a rank's operations with its posts
between them, in one order that all ranks share: ranks that post in it never wait for each other in a circle,
whatever the real timings are and whether the transport keeps one queue for each channel, pair or rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from .table import (
    BACKWARD,
    FORWARD,
    PREFETCH,
    REDUCE,
    RELEASE,
    TOWER,
    VISION_BACKWARD,
    VISION_FORWARD,
    WEIGHT,
    Layout,
    Op,
    Table,
)

if TYPE_CHECKING:
    from .simulate import Timeline

ACTIVATION, GRADIENT = "activation", "gradient"
EMBEDDING, EMBEDDING_GRADIENT = "embedding", "embedding_gradient"
FLOWS = (ACTIVATION, GRADIENT, EMBEDDING, EMBEDDING_GRADIENT)


class DeadlockError(ValueError):
    """Operations wait for each other in a circle; the message names what each rank is stuck at."""


class Message(NamedTuple):
    """One transfer between two pipeline ranks.

    `stage` is the stage that consumes it; in the two embedding flows, the part of the micro-batch's images.
    """

    flow: str
    source: int
    target: int
    stage: int
    microbatch: int

    def __str__(self) -> str:
        place = f"{self.stage},{self.microbatch}"
        return f"{self.flow}({place}) from rank {self.source} to rank {self.target}"


class Step(NamedTuple):
    """One entry of a program.

    "recv" and "send" only post a `Message`; "wait" stands before the use of a received one; "run" executes an
    `Op`.
    """

    action: Literal["recv", "send", "wait", "run"]
    item: Message | Op


def depends(table: Table, rank: int, op: Op) -> tuple[tuple[int, Op], ...]:
    """Operations, each with its rank, that must have ended before `op` of `rank` starts.

    Only what the mathematics needs: the order of a rank's own list comes on top. Of the language model a VB
    waits for the backward of stage 0 alone, which is the last one of its micro-batch.
    """
    layout = table.layout
    kind, chunk, microbatch = op
    if kind == FORWARD:
        stage = layout.stage(rank, chunk)
        return (_at(layout, FORWARD, stage - 1, microbatch),) if stage else _towers(table, microbatch)
    if kind == BACKWARD:
        own, stage = (rank, Op(FORWARD, chunk, microbatch)), layout.stage(rank, chunk)
        return (own,) if stage == layout.stages - 1 else (own, _at(layout, BACKWARD, stage + 1, microbatch))
    if kind == WEIGHT:
        return ((rank, Op(BACKWARD, chunk, microbatch)),)
    if kind == VISION_BACKWARD:
        return (rank, Op(VISION_FORWARD, chunk, microbatch)), _at(layout, BACKWARD, 0, microbatch)
    if kind == REDUCE:
        return tuple((rank, ended) for ended in reduced(table, rank, op))
    if kind == RELEASE:
        return ((rank, Op(FORWARD, chunk, microbatch)),)
    if kind == PREFETCH:
        return ((rank, Op(RELEASE, chunk, microbatch)),)
    return ()


def reduced(table: Table, rank: int, op: Op) -> list[Op]:
    """Operations of a rank whose gradients a `REDUCE` of a chunk, or of the `TOWER`, sums."""
    if op.chunk == TOWER:
        return [
            Op(VISION_BACKWARD, part, microbatch)
            for (microbatch, part), home in table.tower_rank.items()
            if home == rank
        ]
    earlier = [end for end in table.sums.get((rank, op.chunk), ()) if end < op.microbatch]
    first = earlier[-1] + 1 if earlier else 0
    last = WEIGHT if table.splits_backward else BACKWARD
    return [Op(last, op.chunk, microbatch) for microbatch in range(first, op.microbatch + 1)]


def consumes(table: Table, rank: int, op: Op) -> tuple[Message, ...]:
    """Messages that an operation needs; empty where all its inputs are made on its own rank."""
    kind, chunk, microbatch = op
    if kind == VISION_BACKWARD:
        source = table.layout.home(0)[0]
        return _crossing(EMBEDDING_GRADIENT, source, rank, chunk, microbatch)
    if kind not in (FORWARD, BACKWARD):
        return ()
    stage = table.layout.stage(rank, chunk)
    if kind == FORWARD and stage == 0:
        towers = _towers(table, microbatch)
        return sum((_crossing(EMBEDDING, home, rank, part.chunk, microbatch) for home, part in towers), ())
    flow, neighbour = (ACTIVATION, stage - 1) if kind == FORWARD else (GRADIENT, stage + 1)
    if neighbour == table.layout.stages:
        return ()
    return _crossing(flow, table.layout.home(neighbour)[0], rank, stage, microbatch)


def produces(table: Table, rank: int, op: Op) -> tuple[Message, ...]:
    """Messages that an operation's results leave in. A split backward sends with B, not with W."""
    kind, chunk, microbatch = op
    if kind == VISION_FORWARD:
        target = table.layout.home(0)[0]
        return _crossing(EMBEDDING, rank, target, chunk, microbatch)
    if kind not in (FORWARD, BACKWARD):
        return ()
    stage = table.layout.stage(rank, chunk)
    if kind == BACKWARD and stage == 0:
        towers = _towers(table, microbatch)
        return sum(
            (_crossing(EMBEDDING_GRADIENT, rank, home, part.chunk, microbatch) for home, part in towers), ()
        )
    flow, neighbour = (ACTIVATION, stage + 1) if kind == FORWARD else (GRADIENT, stage - 1)
    if neighbour == table.layout.stages:
        return ()
    return _crossing(flow, rank, table.layout.home(neighbour)[0], neighbour, microbatch)


def walk(table: Table) -> Iterator[tuple[int, int, tuple[tuple[int, Op], ...]]]:
    """(rank, index in its list, what it depends on) of every operation, each after all that it waits for.

    Linear in operations and dependencies. Raises:
        DeadlockError: some operations are never reached.
    """
    ended: set[tuple[int, Op]] = set()
    position = [0] * len(table.ranks)
    waiting: dict[tuple[int, Op], list[int]] = {}
    ready = list(reversed(range(len(table.ranks))))
    while ready:
        rank = ready.pop()
        for op in table.ranks[rank][position[rank] :]:
            needed, missing = depends(table, rank, op), None
            for before in needed:
                if before not in ended:
                    missing = before
                    break
            if missing:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, position[rank], needed
            position[rank] += 1
            ended.add((rank, op))
            ready.extend(waiting.pop((rank, op), ()))
    if waiting:
        stuck = sorted((rank, *missing) for missing, ranks in waiting.items() for rank in ranks)
        raise DeadlockError(
            "; ".join(
                f"rank {rank} at {table.ranks[rank][position[rank]]} waits for {op} of rank {other}"
                for rank, other, op in stuck
            )
        )


def programs(table: Table, timeline: Timeline, ahead: int = 1) -> list[list[Step]]:
    """What each rank executes and posts, in order.

    Transfers are numbered by the end of their producers in `timeline`; every rank posts in that numbering:
    a send right after its producer, a receive `ahead` operations before its use, earlier where a later post
    of the same rank would overtake it, later where an earlier one has yet to come.
    """
    number = _numbering(table, timeline)
    return [_program(table, rank, number, ahead) for rank in range(len(table.ranks))]


def _at(layout: Layout, kind: str, stage: int, microbatch: int) -> tuple[int, Op]:
    rank, chunk = layout.home(stage)
    return rank, Op(kind, chunk, microbatch)


def _towers(table: Table, microbatch: int) -> tuple[tuple[int, Op], ...]:
    """(rank, VF) of each part of a micro-batch's images."""
    parts = table.parts[microbatch] if table.parts else 0
    return tuple(
        (table.tower_rank[microbatch, part], Op(VISION_FORWARD, part, microbatch)) for part in range(parts)
    )


def _crossing(flow: str, source: int, target: int, stage: int, microbatch: int) -> tuple[Message, ...]:
    return () if source == target else (Message(flow, source, target, stage, microbatch),)


def _numbering(table: Table, timeline: Timeline) -> dict[Message, int]:
    """One order of all transfers. Where ends are equal, the order in which `walk` meets the producers holds:
    an operation of no cost ends with the one that it waits for."""
    ends = timeline.ends
    producers = sorted(
        (ends[rank][index], met, rank, index) for met, (rank, index, _) in enumerate(walk(table))
    )
    transfers = (
        message
        for *_, rank, index in producers
        for message in produces(table, rank, table.ranks[rank][index])
    )
    return {message: number for number, message in enumerate(transfers)}


def _program(table: Table, rank: int, number: dict[Message, int], ahead: int) -> list[Step]:
    ops = table.ranks[rank]
    needed = [consumes(table, rank, op) for op in ops]
    posts = _posts(table, rank, needed, number, ahead)
    program, upcoming = [], 0
    for index in range(len(ops) + 1):
        while upcoming < len(posts) and posts[upcoming][0] <= index:
            program.append(posts[upcoming][1])
            upcoming += 1
        if index < len(ops):
            program += [Step("wait", message) for message in needed[index]]
            program.append(Step("run", ops[index]))
    return program


def _posts(
    table: Table, rank: int, needed: list[tuple[Message, ...]], number: dict[Message, int], ahead: int
) -> list[tuple[int, Step]]:
    """(index of the operation before which it stands, post) in the order of the numbering."""
    posts = [
        (number[message], max(index - ahead, 0), Step("recv", message))
        for index, messages in enumerate(needed)
        for message in messages
    ] + [
        (number[message], index + 1, Step("send", message))
        for index, op in enumerate(table.ranks[rank])
        for message in produces(table, rank, op)
    ]
    posts.sort(key=lambda post: post[0])
    slots = [slot for _, slot, _ in posts]
    for later in range(len(slots) - 1, 0, -1):
        if posts[later - 1][2].action == "recv":
            slots[later - 1] = min(slots[later - 1], slots[later])
    for earlier in range(len(slots) - 1):
        slots[earlier + 1] = max(slots[earlier], slots[earlier + 1])
    return [(slot, step) for slot, (_, _, step) in zip(slots, posts, strict=True)]

"""Proves that a table can run and computes each gradient once. Imports no torch."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Never

from .messages import DeadlockError, Message, Step, depends, programs
from .rows import RowPlan
from .simulate import simulate, uniform
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
    Op,
    Table,
)

BLOCKING = "blocking sends"

DISCIPLINES: dict[str, Callable[[Message], Hashable]] = {
    "one queue for each flow and pair": lambda message: message[:3],
    "one queue for each ordered pair": lambda message: message[1:3],
    "one queue for each unordered pair": lambda message: frozenset(message[1:3]),
    "one queue for each rank": lambda message: None,
    BLOCKING: lambda message: message,
}
"""What keeps its posts in order: posts of a rank with equal keys. A blocking send is matched by its message,
but its rank does nothing more until the receiver has posted."""


class TableError(ValueError):
    """A table breaks a rule; the message names the rank, the operation and the rule."""


def check(
    table: Table,
    *,
    rows: RowPlan | None = None,
    limit: int | Sequence[int] | None = None,
    buffers: int | None = None,
    transport: bool = True,
) -> None:
    """Raise unless a table is right.

    Every operation stands once and after what it needs; the dependencies of all ranks close no circle, so
    that each image embedding is there before its use and each gradient before the tower's backward; the
    programs made from the table end under every discipline.

    Args:
        rows: also prove that every row is present where it is read and, with its cache, sent once to a rank.
        transport: also run the programs under every discipline, most of the work.
        limit: most chunk activations that a rank may hold at once; a sequence has one entry for each rank.
        buffers: chunks of a rank that may hold gradients at once, from a backward to the sum that follows.

    Raises:
        TableError: the first rule that is broken.
    """
    _check_census(table)
    _check_vision(table)
    _check_sums(table, buffers)
    for rank in range(len(table.ranks)):
        _check_own_order(table, rank)
    costs = uniform(table.layout, parts=table.parts, vision_forward=1, vision_backward=2)
    try:
        timeline = simulate(table, costs)
    except DeadlockError as error:
        raise TableError(f"operations wait for each other in a circle: {error}") from None
    if transport:
        check_programs(programs(table, timeline))
    if limit is not None:
        limits = [limit] * len(table.ranks) if isinstance(limit, int) else limit
        for rank, most in enumerate(limits):
            _check_held(table, rank, most)
    if rows is not None:
        _check_rows(table, rows)


def check_programs(programs: Sequence[Sequence[Step]]) -> None:
    """Raise unless programs end under each way in which a transport may queue their posts.

    A transfer needs both ends, as a rendezvous. Raises:
        TableError: under some discipline posts meet that do not belong together, or ranks wait in a circle.
    """
    for name in DISCIPLINES:
        _Transport(programs, name).run()


def _fail(rank: int, item: object, rule: str) -> Never:
    raise TableError(f"rank {rank}, {item}: {rule}")


def _check_census(table: Table) -> None:
    """Operations of the language model, reductions and moves: the known ones, each once."""
    layout = table.layout
    if len(table.ranks) != layout.pipeline:
        raise TableError(f"the table has {len(table.ranks)} ranks; its layout has {layout.pipeline}")
    kinds = (FORWARD, BACKWARD, WEIGHT) if table.splits_backward else (FORWARD, BACKWARD)
    places = [(chunk, each) for chunk in range(layout.virtual) for each in range(layout.microbatches)]
    needed = {Op(kind, *place): None for kind in kinds for place in places}
    if any(op.kind == REDUCE for ops in table.ranks for op in ops):
        needed |= {Op(REDUCE, chunk, layout.microbatches - 1): None for chunk in range(layout.virtual)}
        needed |= {Op(REDUCE, TOWER, 0): None} if table.parts else {}
    allowed = {Op(kind, *place) for kind in (RELEASE, PREFETCH, REDUCE) for place in places}
    for rank, ops in enumerate(table.ranks):
        own = Counter(op for op in ops if op.kind not in (VISION_FORWARD, VISION_BACKWARD))
        for op, times in own.items():
            if op not in needed and op not in allowed:
                _fail(rank, op, "no such operation in this layout")
            if times > 1:
                _fail(rank, op, f"stands {times} times, must stand once")
        missing = next((op for op in needed if op not in own), None)
        if missing:
            _fail(rank, missing, "is missing")
        _check_pairs(rank, own)


def _check_pairs(rank: int, ops: Iterable[Op]) -> None:
    """Every release has its prefetch, and the other way round."""
    places: dict[str, set[tuple[int, int]]] = {RELEASE: set(), PREFETCH: set()}
    for op in ops:
        if op.kind in places:
            places[op.kind].add((op.chunk, op.microbatch))
    for place in sorted(places[RELEASE] ^ places[PREFETCH]):
        given = place in places[RELEASE]
        _fail(
            rank,
            Op(RELEASE if given else PREFETCH, *place),
            "is released and never prefetched" if given else "is prefetched and was never released",
        )


def _check_vision(table: Table) -> None:
    """Each part's forward and backward stand once, on one rank."""
    parts, expected = table.parts, table.layout.microbatches
    if parts and len(parts) != expected:
        raise TableError(f"parts has {len(parts)} entries; the layout has {expected} micro-batches")
    homes: dict[Op, list[int]] = {
        Op(kind, part, microbatch): []
        for microbatch, count in enumerate(parts)
        for part in range(count)
        for kind in (VISION_FORWARD, VISION_BACKWARD)
    }
    for rank, ops in enumerate(table.ranks):
        for op in ops:
            if op in homes:
                homes[op].append(rank)
            elif op.kind in (VISION_FORWARD, VISION_BACKWARD):
                _fail(rank, op, "no such part of images")
    for op, ranks in homes.items():
        if not ranks:
            raise TableError(f"{op}: is missing on every rank")
        if len(ranks) > 1:
            _fail(ranks[-1], op, f"stands {len(ranks)} times, must stand once")
        forward = homes[Op(VISION_FORWARD, op.chunk, op.microbatch)][0]
        if forward != ranks[0]:
            _fail(ranks[0], op, f"its forward ran on rank {forward}; both must share a rank")


def _check_sums(table: Table, buffers: int | None) -> None:
    """Each gradient is in one sum, by which no later one is carried off; few chunks hold some at once.

    That no gradient misses its sum follows from the order that `reduced` asks for.
    """
    last = WEIGHT if table.splits_backward else BACKWARD
    for rank, ops in enumerate(table.ranks):
        ahead = {chunk: list(ends) for (home, chunk), ends in table.sums.items() if home == rank}
        holding: dict[int, Op] = {}
        for op in ops:
            if op.kind == REDUCE and op.chunk in ahead:
                ahead[op.chunk].remove(op.microbatch)
                holding.pop(op.chunk, None)
            elif op.kind == last and ahead.get(op.chunk):
                holding[op.chunk] = op
                following = Op(REDUCE, op.chunk, ahead[op.chunk][0])
                if following.microbatch < op.microbatch:
                    _fail(rank, op, f"comes before {following}, which is not to sum it")
            if buffers is not None and len(holding) > buffers:
                _fail(rank, op, f"{len(holding)} chunks hold gradients, there are {buffers} buffers")


def _check_own_order(table: Table, rank: int) -> None:
    at = {op: index for index, op in enumerate(table.ranks[rank])}
    for op, index in at.items():
        for home, before in depends(table, rank, op):
            if home == rank and at[before] > index:
                _fail(rank, op, f"comes before {before}, which it needs")
        if op.kind == PREFETCH and at[Op(BACKWARD, op.chunk, op.microbatch)] < index:
            _fail(rank, op, "comes after the backward that needs it")


def _check_held(table: Table, rank: int, limit: int) -> None:
    """In units of one micro-batch through one chunk, from F to the end of its backward."""
    last = WEIGHT if table.splits_backward else BACKWARD
    signs = {FORWARD: 1, PREFETCH: 1, RELEASE: -1, last: -1}
    held = 0
    for op in table.ranks[rank]:
        held += signs.get(op.kind, 0)
        if held > limit:
            _fail(rank, op, f"{held} chunk activations are held, the limit is {limit}")


def _check_rows(table: Table, rows: RowPlan) -> None:
    """Follow one micro-batch through the stages: dependencies force the same order on each of them."""
    layout = table.layout
    planned = (rows.layout.pipeline, rows.layout.virtual, rows.layout.vee)
    if planned != (layout.pipeline, layout.virtual, layout.vee):
        raise TableError(f"the rows are planned for {rows.layout}; the table has {layout}")
    kept: list[set[int]] = [set() for _ in table.ranks]
    for stage in range(layout.stages):
        rank, chunk = layout.home(stage)
        source = layout.home(stage - 1)[0] if stage else rank
        forward, arriving = Op(FORWARD, chunk, 0), set(rows.arriving(stage))
        unknown = arriving - kept[source]
        if unknown:
            _fail(rank, forward, f"row {min(unknown)} is not on rank {source}, which sends it")
        if rows.cache and source != rank and arriving & kept[rank]:
            _fail(rank, forward, f"row {min(arriving & kept[rank])} is sent to the rank a second time")
        kept[rank] = arriving | (kept[rank] if rows.cache else set())
        missing = {row for row, maker in enumerate(rows.made) if maker < stage} - kept[rank]
        if missing:
            _fail(rank, forward, f"row {min(missing)} is read and not present")
        kept[rank] |= {row for row, maker in enumerate(rows.made) if maker == stage}


class _Transport:
    """Executes programs under one discipline; whatever the timings, the outcome is the same."""

    def __init__(self, programs: Sequence[Sequence[Step]], name: str) -> None:
        self.name, self.key = name, DISCIPLINES[name]
        self.programs = [_blocking(program) for program in programs] if name == BLOCKING else programs
        self.position = [0] * len(programs)
        self.queues: dict[tuple[int, Hashable], deque[Message]] = defaultdict(deque)
        self.done: set[Message] = set()
        self.ready = deque(range(len(programs)))

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.popleft())
        stuck = [
            f"rank {rank} waits for {program[position].item}"
            for rank, (program, position) in enumerate(zip(self.programs, self.position, strict=True))
            if position < len(program)
        ] or [f"rank {rank} posts {queue[0]} alone" for (rank, _), queue in self.queues.items() if queue]
        if stuck:
            raise TableError(f"the programs do not end with {self.name}: {'; '.join(stuck)}")

    def _advance(self, rank: int) -> None:
        program = self.programs[rank]
        while self.position[rank] < len(program):
            action, item = program[self.position[rank]]
            if action == "wait" and item not in self.done:
                return
            self.position[rank] += 1
            if action in ("send", "recv"):
                assert isinstance(item, Message)
                self.queues[rank, self.key(item)].append(item)
                self._settle(rank, item)

    def _settle(self, rank: int, message: Message) -> None:
        """Complete transfers whose posts stand first at both ends, beginning with a message just posted."""
        key = self.key(message)
        open_queues = [(rank, key)]
        while open_queues:
            near, key = open_queues.pop()
            if not self.queues[near, key]:
                continue
            head = self.queues[near, key][0]
            far = head.target if head.source == near else head.source
            if not self.queues[far, key]:
                continue
            other = self.queues[far, key][0]
            if other == head:
                self.queues[near, key].popleft()
                self.queues[far, key].popleft()
                self.done.add(head)
                self.ready += near, far
                open_queues += (near, key), (far, key)
            elif near in (other.source, other.target):
                rule = f"meets {other}, posted by rank {far}, with {self.name}"
                _fail(near, head, rule)


def _blocking(program: Sequence[Step]) -> list[Step]:
    return [
        entry
        for step in program
        for entry in ((step, Step("wait", step.item)) if step.action == "send" else (step,))
    ]

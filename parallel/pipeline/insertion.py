"""Insertion of operations into a table by heads and tails. Imports no torch.

The end of an operation is the length of the longest path that leads up to and through it; its tail is the
length of the longest path from its start to the end of the step. A new operation of cost c between two
neighbours of a rank then makes the step exactly max(T, h + c + t) long: h is the latest end among its
predecessors, t the largest tail among its successors, T the length so far. So each slot of each rank is
judged by a few additions. Source: insertion moves of job-shop scheduling (Taillard 1994).

Times are integer ticks, at least one each: rounding then never decides a tie, and ends grow along each path.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from .messages import walk
from .simulate import Costs, durations
from .table import BACKWARD, FORWARD, VISION_BACKWARD, VISION_FORWARD, Op, Table

TICKS = 64 * 720_720
"""Ticks of the longest operation. Divisible by 1 to 16, so that simple fractions of it stay exact."""

SLACK = 1e-9
"""Relative tolerance of a cap, whose sizes may be floats."""

Rule = Literal["early", "late", "near"]

Edges = tuple[int, ...]
"""Nodes on other ranks, a message away."""


class Part(NamedTuple):
    """Images of one micro-batch that pass the tower together; times in ticks, size as the cap's unit."""

    microbatch: int
    part: int
    forward: int
    backward: int
    size: float

    @property
    def ops(self) -> tuple[Op, Op]:
        """Its forward and its backward."""
        return Op(VISION_FORWARD, self.part, self.microbatch), Op(VISION_BACKWARD, self.part, self.microbatch)


class Pair(NamedTuple):
    """Slots for the forward and the backward of a part on one rank; less is better.

    `worst`: length of the step with either of them; `then`: sum of the longest paths through the two or, by
    the rule "near", time between them.
    """

    worst: int
    then: int
    rank: int
    forward: int
    backward: int


class Slots(NamedTuple):
    """A rank's slots; slot i stands before its i-th operation, the last one after all. Int64, in ticks."""

    ends: np.ndarray
    tails: np.ndarray


@dataclass
class Paths:
    """Longest paths in one direction: ends of operations, or their tails.

    `near[node]` is the neighbour on its rank that the path comes through, 0 if none, `far[node]` those on
    other ranks.
    """

    values: list[int]
    near: list[int]
    far: list[Edges]

    def copy(self) -> Paths:
        """Paths that change on their own."""
        return Paths(list(self.values), list(self.near), list(self.far))

    def add(self, near: int, far: Edges) -> None:
        """A new node, its value to be computed."""
        self.values.append(0)
        self.near.append(near)
        self.far.append(far)


@dataclass(frozen=True)
class Ticks:
    """Integer times of the operations of a table without vision, and of its parts."""

    durations: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]
    hop: int

    @classmethod
    def of(cls, table: Table, costs: Costs, sizes: Sequence[Sequence[float]]) -> Ticks:
        """Scale `costs`; `sizes[k][j]` is what part j of micro-batch k holds between its two operations."""
        spent = durations(table, costs)
        vision = [cost for row in (*costs.vision_forward, *costs.vision_backward) for cost in row]
        unit = max(max(map(max, spent)), *vision, costs.hop) or 1

        def ticks(cost: float) -> int:
            return round(cost * TICKS / unit)

        parts = tuple(
            Part(microbatch, part, max(1, ticks(ahead)), max(1, ticks(back)), size)
            for microbatch, rows in enumerate(
                zip(costs.vision_forward, costs.vision_backward, sizes, strict=True)
            )
            for part, (ahead, back, size) in enumerate(zip(*rows, strict=True))
        )
        scaled = tuple(tuple(max(1, ticks(cost)) for cost in row) for row in spent)
        return cls(scaled, parts, ticks(costs.hop))


class Network:
    """A table as a graph that grows, with the end and the tail of each operation.

    Node 0 stands for "none": no cost, end and tail 0.
    """

    def __init__(self, table: Table, ticks: Ticks) -> None:
        self.pipeline, self.first_rank = table.layout.pipeline, table.layout.home(0)[0]
        self.hop = ticks.hop
        self.ops: list[Op] = [Op("", 0, 0)]
        self.cost: list[int] = [0]
        self.rank: list[int] = [-1]
        self.order: list[list[int]] = []
        for rank, ops in enumerate(table.ranks):
            self.order.append(list(range(len(self.ops), len(self.ops) + len(ops))))
            self.ops += ops
            self.cost += ticks.durations[rank]
            self.rank += [rank] * len(ops)
        count = len(self.ops)
        self.size: list[float] = [0.0] * count
        self.heads, self.tails = (Paths([0] * count, [0] * count, [()] * count) for _ in range(2))
        self.slots: list[Slots | None] = [None] * self.pipeline
        self.levels: list[np.ndarray | None] = [None] * self.pipeline
        self.placed: dict[Part, tuple[int, int]] = {}
        topological = self._connect(table)
        self._sweep(topological, self.heads)
        self._sweep(topological[::-1], self.tails)
        self.makespan = max(self.heads.values)

    def _connect(self, table: Table) -> list[int]:
        """Make the edges; returns all nodes in an order that follows them."""
        ids: dict[tuple[int, Op], int] = {}
        for rank, nodes in enumerate(self.order):
            ids.update(((rank, self.ops[node]), node) for node in nodes)
            for node, follower in pairwise(nodes):
                self.heads.near[follower], self.tails.near[node] = node, follower
        topological = []
        for rank, index, needed in walk(table):
            node = self.order[rank][index]
            topological.append(node)
            for other in (ids[before] for before in needed if before[0] != rank):
                self.heads.far[node] += (other,)
                self.tails.far[other] += (node,)
        first = [
            [ids[self.first_rank, Op(kind, 0, microbatch)] for microbatch in range(table.layout.microbatches)]
            for kind in (FORWARD, BACKWARD)
        ]
        self.entrance, self.exit = first
        return topological

    def copy(self) -> Network:
        """A network that grows on its own."""
        other = object.__new__(Network)
        other.__dict__.update(self.__dict__)
        for name in ("ops", "cost", "rank", "size", "slots", "levels"):
            setattr(other, name, list(getattr(self, name)))
        other.heads, other.tails = self.heads.copy(), self.tails.copy()
        other.order = [list(nodes) for nodes in self.order]
        other.placed = dict(self.placed)
        return other

    def ranks(self) -> tuple[tuple[Op, ...], ...]:
        """Operations of each rank, in order."""
        return tuple(tuple(self.ops[node] for node in nodes) for nodes in self.order)

    def start(self, node: int) -> int:
        """When an operation starts."""
        return self.heads.values[node] - self.cost[node]

    def place(self, part: Part, rule: Rule, cap: float | None) -> bool:
        """Insert both operations of a part on the rank that suffers least. False: the cap leaves none.

        Args:
            rule: which slots of a rank: those with the shortest paths through them and of equal ones the
                earliest for the forward and the latest for the backward ("early") or the other way round
                ("late"); or the last for the forward and the first for the backward that make the step no
                longer than the best ones do ("near"), which holds activations least long.
            cap: most that a rank may hold; None for no bound.
        """
        pairs = (self._pair(rank, part, rule, cap) for rank in range(self.pipeline))
        best = min((pair for pair in pairs if pair is not None), default=None)
        if best is None:
            return False
        ahead, back = part.ops
        same = best.rank == self.first_rank
        user: Edges = () if same else (self.entrance[part.microbatch],)
        maker: Edges = () if same else (self.exit[part.microbatch],)
        self.placed[part] = (
            self._insert(ahead, best.rank, best.forward, part.forward, part.size, (), user),
            self._insert(back, best.rank, best.backward + 1, part.backward, -part.size, maker, ()),
        )
        return True

    def remove(self, part: Part) -> None:
        """Take both operations of a placed part out again. Linear in the number of operations."""
        for node in self.placed.pop(part):
            left, right = self.heads.near[node], self.tails.near[node]
            self._join(left, right)
            self.order[self.rank[node]].remove(node)
            self.levels[self.rank[node]] = None
            for paths, mirror in ((self.heads, self.tails), (self.tails, self.heads)):
                for other in paths.far[node]:
                    mirror.far[other] = tuple(user for user in mirror.far[other] if user != node)
                paths.near[node], paths.far[node], paths.values[node] = 0, (), 0
        for paths in (self.heads, self.tails):
            live = [node for nodes in self.order for node in nodes]
            self._sweep(sorted(live, key=paths.values.__getitem__), paths)
        self.slots = [None] * self.pipeline
        self.makespan = max(self.heads.values)

    def _pair(self, rank: int, part: Part, rule: Rule, cap: float | None) -> Pair | None:
        """The best two slots of a rank, judged apart.

        A forward may follow what starts before its use does, a backward precede what ends after its gradient
        is there: neither can then close a circle.
        """
        ends, tails = self._slots(rank)
        lag = 0 if rank == self.first_rank else self.hop
        use = self.tails.values[self.entrance[part.microbatch]] + lag
        ready = self.heads.values[self.exit[part.microbatch]]
        last = bisect_left(self.order[rank], self.start(self.entrance[part.microbatch]), key=self.start)
        first = max(last, int(ends[1:].searchsorted(ready, side="right")))
        room = (0, len(tails)) if cap is None else self._room(rank, last, first, cap - part.size)
        if room is None:
            return None
        low, high = room
        ahead = ends[low : last + 1] + np.maximum(tails[low : last + 1], use) + part.forward
        back = np.maximum(ends[first:high], ready + lag) + tails[first:high] + part.backward
        if rule == "near":
            ahead, back = np.maximum(ahead, self.makespan), np.maximum(back, self.makespan)
        forward, backward = _least(ahead, last=rule != "early"), _least(back, last=rule == "early")
        worst = max(self.makespan, int(ahead[forward]), int(back[backward]))
        between = ends[first + backward] - ends[low + forward]
        then = between if rule == "near" else ahead[forward] + back[backward]
        return Pair(worst, int(then), rank, low + forward, first + backward)

    def _room(self, rank: int, last: int, first: int, limit: float) -> tuple[int, int] | None:
        """Slots around those from `last` to `first` in which a rank holds at most `limit`, as a start and an
        exclusive end; None if it holds more between them."""
        levels = self._levels(rank)
        full = np.flatnonzero(levels > limit + SLACK * (abs(limit) + 1))
        earlier, later = full[full < last], full[full > first]
        if len(earlier) + len(later) < len(full):
            return None
        return int(earlier[-1]) + 1 if len(earlier) else 0, int(later[0]) if len(later) else len(levels)

    def _levels(self, rank: int) -> np.ndarray:
        """What a rank holds in each of its slots."""
        levels = self.levels[rank]
        if levels is None:
            nodes = (0, *self.order[rank])
            sizes = np.fromiter(map(self.size.__getitem__, nodes), np.float64, len(nodes))
            levels = self.levels[rank] = sizes.cumsum()
        return levels

    def _slots(self, rank: int) -> Slots:
        slots = self.slots[rank]
        if slots is None:
            before, after = (0, *self.order[rank]), (*self.order[rank], 0)
            ends = np.fromiter(map(self.heads.values.__getitem__, before), np.int64, len(before))
            tails = np.fromiter(map(self.tails.values.__getitem__, after), np.int64, len(after))
            slots = self.slots[rank] = Slots(ends, tails)
        return slots

    def _insert(
        self, op: Op, rank: int, slot: int, cost: int, size: float, before: Edges, after: Edges
    ) -> int:
        nodes, node = self.order[rank], len(self.ops)
        left = nodes[slot - 1] if slot else 0
        right = nodes[slot] if slot < len(nodes) else 0
        nodes.insert(slot, node)
        self.ops.append(op)
        self.cost.append(cost)
        self.rank.append(rank)
        self.size.append(size)
        self.heads.add(left, before)
        self.tails.add(right, after)
        self._join(left, node)
        self._join(node, right)
        for other in before:
            self.tails.far[other] += (node,)
        for other in after:
            self.heads.far[other] += (node,)
        self.slots[rank] = self.levels[rank] = None
        self._lengthen(node)
        return node

    def _join(self, left: int, right: int) -> None:
        """Make two nodes of a rank neighbours; 0 stands for none."""
        if right:
            self.heads.near[right] = left
        if left:
            self.tails.near[left] = right

    def _lengthen(self, node: int) -> None:
        """Bring ends and tails up to date with a new node."""
        for paths in (self.heads, self.tails):
            paths.values[node] = self._longest(node, paths)
        length = self.start(node) + self.tails.values[node]
        for paths, mirror in ((self.heads, self.tails), (self.tails, self.heads)):
            users = [mirror.near[node], *mirror.far[node]]
            users = [user for user in users if user and self._longest(user, paths) > paths.values[user]]
            if users and length > self.makespan:
                self._shift(node, users, paths)
            elif users:
                self._ripple(users, paths, mirror)
        self.makespan = max(self.makespan, length)

    def _longest(self, node: int, paths: Paths) -> int:
        values = paths.values
        best = values[paths.near[node]]
        for other in paths.far[node]:
            value = values[other] + self.hop
            if value > best:
                best = value
        return best + self.cost[node]

    def _shift(self, node: int, users: list[int], paths: Paths) -> None:
        """Much changes: go over all that may. Old values order the old nodes as their edges do."""
        values = paths.values
        bound = min(values[user] for user in users)
        changed = [other for other in range(1, node) if values[other] >= bound]
        changed.sort(key=values.__getitem__)
        self._sweep(changed, paths)
        self.slots = [None] * self.pipeline

    def _sweep(self, nodes: Iterable[int], paths: Paths) -> None:
        """Recompute values, each node after those that it depends on."""
        values, near, far, cost, hop = paths.values, paths.near, paths.far, self.cost, self.hop
        for node in nodes:
            best = values[near[node]]
            for other in far[node]:
                value = values[other] + hop
                if value > best:
                    best = value
            values[node] = best + cost[node]

    def _ripple(self, users: list[int], paths: Paths, mirror: Paths) -> None:
        """Little changes: follow it. In the order of old values each node is met once."""
        values = paths.values
        heap = sorted((values[user], user) for user in users)
        while heap:
            _, node = heappop(heap)
            value = self._longest(node, paths)
            if value == values[node]:
                continue
            values[node] = value
            self.slots[self.rank[node]] = None
            for user in (mirror.near[node], *mirror.far[node]):
                if user:
                    heappush(heap, (values[user], user))


def _least(values: np.ndarray, last: bool) -> int:
    """Index of the first, or last, of the least values."""
    return len(values) - 1 - int(values[::-1].argmin()) if last else int(values.argmin())

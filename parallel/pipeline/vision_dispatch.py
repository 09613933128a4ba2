"""Vision work given to whoever waits: one pass over a table, for those too large to weigh slots. No torch.

Each rank runs its operations of the language model in order, as soon as their inputs are there. A rank that
waits for longer than a part of some micro-batch's images takes runs that part: the next forward, or a
backward whose gradient has come, as far as a cap on what it holds allows. The language model is held up only
where its first stage comes to a micro-batch whose images nobody had time for: it runs them itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from .messages import depends
from .simulate import Costs, durations
from .table import BACKWARD, FORWARD, VISION_BACKWARD, VISION_FORWARD, Op, Table

URGENT = 2
"""Forwards of so many micro-batches from the next one on come before backwards that could run."""


def dispatch(
    table: Table, costs: Costs, cap: float, sizes: Sequence[Sequence[float]]
) -> tuple[tuple[Op, ...], ...] | None:
    """Operations of each rank; None where the cap leaves parts that nobody could take.

    Time is that of sorting the operations. Deterministic. Args:
        table: of the language model alone.
        costs: with those of the tower's parts.
        cap: most that a rank may hold of `sizes`; infinite for no bound.
        sizes: what a part holds from its forward to its backward, by micro-batch and part.
    """
    return _Dispatch(table, costs, cap, sizes).run()


class _Dispatch:
    """The state of all ranks at one moment; moments come in order."""

    def __init__(self, table: Table, costs: Costs, cap: float, sizes: Sequence[Sequence[float]]) -> None:
        self.table, self.costs, self.cap, self.sizes = table, costs, cap, sizes
        self.spent = durations(table, costs)
        ranks = range(len(table.ranks))
        self.first = table.layout.home(0)[0]
        self.done: list[list[Op]] = [[] for _ in ranks]
        self.position, self.free, self.held = [0 for _ in ranks], [0.0 for _ in ranks], [0.0 for _ in ranks]
        self.ended: dict[tuple[int, Op], float] = {}
        self.waiting: dict[tuple[int, Op] | int, set[int]] = {}
        """Ranks by what has yet to start: an operation, or the tower's work for a micro-batch."""
        self.moments = [(0.0, rank) for rank in ranks]
        heapify(self.moments)
        self.parts = [(k, part) for k, row in enumerate(costs.vision_forward) for part in range(len(row))]
        self.given, self.reached = 0, 0
        """Forwards that are given out, and micro-batches that the first stage has come to."""
        self.left = [len(row) for row in costs.vision_forward]
        self.features = [0.0] * len(self.left)
        """When the features of a micro-batch are at the first stage."""
        self.home: dict[tuple[int, int], int] = {}
        self.ready: list[list[tuple[float, int, int]]] = [[] for _ in ranks]
        """Backwards by the time when their gradient is there."""

    def run(self) -> tuple[tuple[Op, ...], ...] | None:
        """Go through all moments."""
        while self.moments:
            now, rank = heappop(self.moments)
            if self.free[rank] <= now:
                self._choose(now, rank)
        counts = [len(ops) for ops in self.table.ranks]
        if self.position != counts or self.given < len(self.parts) or any(self.ready):
            return None
        return tuple(map(tuple, self.done))

    def _choose(self, now: float, rank: int) -> None:
        """What a free rank does: its next operation, else a part of the tower's work, else it waits."""
        ops, position = self.table.ranks[rank], self.position[rank]
        if position == len(ops):
            self._tower(now, rank, math.inf)
            return
        op = ops[position]
        missing, arrival = self._inputs(rank, op)
        if missing is None and arrival <= now:
            self._run(now, rank, op)
        elif isinstance(missing, int):
            if not self._tower(now, rank, math.inf):
                self.waiting.setdefault(missing, set()).add(rank)
        elif not self._tower(now, rank, arrival - now):
            if missing is None:
                heappush(self.moments, (arrival, rank))
            else:
                self.waiting.setdefault(missing, set()).add(rank)

    def _inputs(self, rank: int, op: Op) -> tuple[tuple[int, Op] | int | None, float]:
        """What an operation waits for that has not started, and else when all is there."""
        arrival = 0.0
        for before in depends(self.table, rank, op):
            end = self.ended.get(before)
            if end is None:
                return before, math.inf
            arrival = max(arrival, end if before[0] == rank else end + self.costs.hop)
        if rank == self.first and op.kind == FORWARD and op.chunk == 0:
            if self.left[op.microbatch]:
                return op.microbatch, math.inf
            arrival = max(arrival, self.features[op.microbatch])
        return None, arrival

    def _run(self, now: float, rank: int, op: Op) -> None:
        """An operation of the language model."""
        end = self._spend(now, rank, op, self.spent[rank][self.position[rank]])
        self.position[rank] += 1
        self.ended[rank, op] = end
        self._wake((rank, op), now)
        if rank != self.first or op.chunk:
            return
        if op.kind == FORWARD:
            self.reached = op.microbatch + 1
            for other in range(len(self.done)):
                heappush(self.moments, (now, other))
        elif op.kind == BACKWARD:
            for part in range(len(self.costs.vision_forward[op.microbatch])):
                home = self.home[op.microbatch, part]
                ready = end if home == rank else end + self.costs.hop
                heappush(self.ready[home], (ready, op.microbatch, part))
                heappush(self.moments, (ready, home))

    def _tower(self, now: float, rank: int, idle: float) -> bool:
        """Use `idle` seconds for the tower, if anything that can run is short enough."""
        urgent = self.given < len(self.parts) and self.parts[self.given][0] < self.reached + URGENT
        if urgent and self._forward(now, rank, idle):
            return True
        return self._backward(now, rank, idle) or self._forward(now, rank, idle)

    def _forward(self, now: float, rank: int, idle: float) -> bool:
        """The next part, if it fits into time and memory."""
        if self.given == len(self.parts):
            return False
        microbatch, part = self.parts[self.given]
        cost, size = self.costs.vision_forward[microbatch][part], self.sizes[microbatch][part]
        if cost > idle or self.held[rank] + size > self.cap:
            return False
        end = self._spend(now, rank, Op(VISION_FORWARD, part, microbatch), cost)
        self.given += 1
        self.home[microbatch, part] = rank
        self.held[rank] += size
        self.left[microbatch] -= 1
        there = end if rank == self.first else end + self.costs.hop
        self.features[microbatch] = max(self.features[microbatch], there)
        if not self.left[microbatch]:
            self._wake(microbatch, now)
        return True

    def _backward(self, now: float, rank: int, idle: float) -> bool:
        """The first part whose gradient has come, if it fits into the time."""
        if not self.ready[rank] or self.ready[rank][0][0] > now:
            return False
        _, microbatch, part = self.ready[rank][0]
        cost = self.costs.vision_backward[microbatch][part]
        if cost > idle:
            return False
        heappop(self.ready[rank])
        self.held[rank] -= self.sizes[microbatch][part]
        self._spend(now, rank, Op(VISION_BACKWARD, part, microbatch), cost)
        return True

    def _spend(self, now: float, rank: int, op: Op, cost: float) -> float:
        """Add an operation; returns its end."""
        end = now + cost
        self.done[rank].append(op)
        self.free[rank] = end
        heappush(self.moments, (end, rank))
        return end

    def _wake(self, key: tuple[int, Op] | int, now: float) -> None:
        for rank in self.waiting.pop(key, ()):
            heappush(self.moments, (now, rank))

"""The planner in plain integers and lists: what every other implementation must equal, value by value.

Letters: R ranks, E experts, P = E/R experts at home on a rank, K experts of a token, G = 2P segments of a
rank, r source rank, d destination rank, h home rank, e expert. Steps A to F and ties are as in MoonEP
(Kimi K3 report, arXiv:2607.24653, section 5.2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

Matrix = list[list[int]]


class Move(NamedTuple):
    """Rows of an expert, or of all experts of a home rank, that another rank computes."""

    source: int
    """Home rank in step B, expert in step C."""
    destination: int
    rows: int


def capacities(total_rows: int, ranks: int) -> list[int]:
    """Rows that each rank computes: equal, the first ranks taking one of the remainder each."""
    share, rest = divmod(total_rows, ranks)
    return [share + (rank < rest) for rank in range(ranks)]


def loads(counts: Sequence[Sequence[int]]) -> list[int]:
    """Step A: [R, E] to the rows of each expert [E]."""
    return list(map(sum, zip(*counts, strict=True)))


def donations(load: Sequence[int], ranks: int) -> list[Move]:
    """Step B: which home rank fills which other one, with how many rows. At most R - 1 moves.

    load [E] are the rows of each expert. The fullest rank fills the emptiest one up to its capacity in one
    go; of equal ones the lowest is taken.
    """
    places, capacity = len(load) // ranks, capacities(sum(load), ranks)
    balance = [sum(load[h * places : (h + 1) * places]) - capacity[h] for h in range(ranks)]
    donors = [(-surplus, rank) for rank, surplus in enumerate(balance) if surplus > 0]
    receivers = [(missing, rank) for rank, missing in enumerate(balance) if missing < 0]
    heapify(donors)
    heapify(receivers)
    found: list[Move] = []
    while donors:
        (surplus, donor), (missing, receiver) = heappop(donors), heappop(receivers)
        found.append(Move(donor, receiver, -missing))
        left = missing - surplus
        if left > 0:
            heappush(donors, (-left, donor))
        elif left < 0:  # it gave of its own share, and is filled in its turn
            heappush(receivers, (left, donor))
    return found


def moves(load: Sequence[int], ranks: int) -> list[Move]:
    """Steps B and C: which rows of which expert leave home, grouped by home rank."""
    places = len(load) // ranks
    quotas: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for donor, receiver, rows in donations(load, ranks):
        quotas[donor].append((receiver, rows))
    return [
        Move(home * places + place, receiver, rows)
        for home, quota in enumerate(quotas)
        if quota
        for place, receiver, rows in _split(load[home * places : (home + 1) * places], quota)
    ]


def _split(load: Sequence[int], quota: Sequence[tuple[int, int]]) -> list[Move]:
    """Step C for one home rank: the largest expert serves the largest open quota; of equals, the lowest."""
    experts = [(-rows, place) for place, rows in enumerate(load)]
    receivers = [(-rows, receiver) for receiver, rows in quota]
    heapify(experts)
    heapify(receivers)
    found = []
    while receivers:
        (left, place), (missing, receiver) = experts[0], receivers[0]  # rows are negative here
        rows = min(-left, -missing)
        found.append(Move(place, receiver, rows))
        heapreplace(experts, (left + rows, place))
        if missing + rows:
            heapreplace(receivers, (missing + rows, receiver))
        else:
            heappop(receivers)
    return found


def fill(counts: Sequence[Sequence[int]]) -> Matrix:
    """counts [R, E] of sources to alloc [R, E] of destinations: every rank gets exactly its capacity."""
    load, ranks = loads(counts), len(counts)
    alloc = stay(load, ranks)
    places = len(load) // ranks
    for expert, destination, rows in moves(load, ranks):
        alloc[destination][expert] = rows
        alloc[expert // places][expert] -= rows
    return alloc


def stay(load: Sequence[int], ranks: int) -> Matrix:
    """alloc [R, E] that leaves every row at the home of its expert."""
    places = len(load) // ranks
    alloc = [[0] * len(load) for _ in range(ranks)]
    for rank, row in enumerate(alloc):
        own = slice(rank * places, (rank + 1) * places)
        row[own] = load[own]
    return alloc


class Layout(NamedTuple):
    """The tables of `types.Tables`, as lists."""

    slots: Matrix
    ends: Matrix
    starts: Matrix
    send: Matrix


def tables(alloc: Sequence[Sequence[int]], counts: Sequence[Sequence[int]], pad: int) -> Layout:
    """Step D: slots, segments and exchanged entries of an allocation."""
    ranks, experts = len(alloc), len(alloc[0])
    layout = Layout([], [], [], send(alloc, counts))
    for rank, row in enumerate(alloc):
        own = range(rank * experts // ranks, (rank + 1) * experts // ranks)
        remote = [expert for expert in range(experts) if row[expert] and expert not in own]
        starts, ends, end = [0] * experts, [], 0
        for expert in [*own, *remote]:
            starts[expert] = end if row[expert] else 0
            end += -(-row[expert] // pad) * pad
            ends.append(end)
        unused = len(own) - len(remote)
        layout.slots.append(remote + [-1] * unused)
        layout.ends.append(ends + [end] * unused)
        layout.starts.append(starts)
    return layout


def send(alloc: Sequence[Sequence[int]], counts: Sequence[Sequence[int]]) -> Matrix:
    """[R, R] entries from source to destination. Both share out an expert's rows in rank order."""
    ranks = len(alloc)
    result = [[0] * ranks for _ in range(ranks)]
    for wanted, offered in zip(zip(*alloc, strict=True), zip(*counts, strict=True), strict=True):
        destination, room = 0, wanted[0]
        for source, entries in enumerate(offered):
            while entries:
                while not room:
                    destination += 1
                    room = wanted[destination]
                taken = min(entries, room)
                result[source][destination] += taken
                entries, room = entries - taken, room - taken
    return result


def rows(
    choice: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    alloc: Sequence[Sequence[int]],
    starts: Sequence[Sequence[int]],
    rank: int,
    stride: int,
) -> tuple[list[int], list[bool]]:
    """Steps E and F: the row of each entry of this rank, and whether it is its token's first there.

    choice [S, K] holds physical experts. Entries of an expert are numbered over the source ranks in their
    order, on each in the order of i = t * K + k, and dealt to the destinations in rank order.
    """
    number = [sum(counts[source][expert] for source in range(rank)) for expert in range(len(alloc[0]))]
    placed, first = [], []
    for token in choice:
        reached: set[int] = set()
        for expert in token:
            row, destination = number[expert], 0
            while row >= alloc[destination][expert]:
                row -= alloc[destination][expert]
                destination += 1
            placed.append(destination * stride + starts[destination][expert] + row)
            first.append(destination not in reached)
            reached.add(destination)
            number[expert] += 1
    return placed, first

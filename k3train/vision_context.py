"""Which rank of a context group works on which rows of which image; imports no torch.

All ranks of the group compute the same answer from the same grids. A large item is cut along its rows over
neighbouring ranks, its sub-group; a small one lies whole on one rank. Rows are cut at multiples of
`vision.merge` and for all frames alike, so that averaging frames and merging neighbours stay on a rank. Only
attention looks beyond: keys and values of a cut item go to all of its ranks.

Letters: N ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .config import Config
from .flops import TERA
from .microbatch import element_bytes
from .vision_config import VisionConfig
from .vision_shapes import Grid, attention_channels, check_grid, image_cost, patches, tokens

LIMITS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, float("inf"))
"""Loads over the mean that a rank may have before an item is cut further: the first that can be kept, or else
the one that gives the least load."""

DIGITS = 2
"""Of loads over the mean: what is equal so far is as good, and the one with fewer cuts is taken."""

Slice = tuple[int, int]
"""Rows from the first up to the second."""


class Piece(NamedTuple):
    """Rows `first` up to `stop` of the patches of an item, all of its frames and columns."""

    grid: Grid
    """Of the whole item."""
    first: int
    stop: int

    @property
    def local(self) -> Grid:
        """Frames, rows and columns that are here."""
        t, _, w = self.grid
        return t, self.stop - self.first, w

    @property
    def patches(self) -> int:
        """Patches that are here."""
        return patches(self.local)


@dataclass(frozen=True)
class Assignment:
    """Rows of each item on each rank."""

    grids: tuple[Grid, ...]
    borders: tuple[tuple[int, ...], ...]
    """For each item, the row of patches at which each rank's share starts, and the number of its rows."""
    loads: tuple[float, ...]
    """FLOPs of the forward pass of each rank."""

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.loads)

    @property
    def imbalance(self) -> float:
        """The largest load over the mean: 1 where all ranks have the same."""
        return max(self.loads) * self.ranks / sum(self.loads)

    @property
    def is_cut(self) -> bool:
        """Whether an item lies on several ranks: keys and values travel."""
        return any(len(self.members(item)) > 1 for item in range(len(self.grids)))

    def members(self, item: int) -> list[int]:
        """Ranks that have rows of an item."""
        return [rank for rank, (first, stop) in enumerate(pairwise(self.borders[item])) if first < stop]

    def piece(self, item: int, rank: int) -> Piece:
        """What a rank has of an item; may be no row."""
        return Piece(self.grids[item], self.borders[item][rank], self.borders[item][rank + 1])

    def pieces(self, rank: int) -> list[tuple[int, Piece]]:
        """(item, piece) of all that a rank has, in the order of the items."""
        found = ((item, self.piece(item, rank)) for item in range(len(self.grids)))
        return [(item, piece) for item, piece in found if piece.patches]

    def tokens(self, merge: int) -> list[list[int]]:
        """Embeddings that each rank makes of each item: [item][rank]."""
        counts = []
        for item, (t, _, _) in enumerate(self.grids):
            found = [self.piece(item, rank).patches for rank in range(self.ranks)]
            counts.append([count // (t * merge**2) for count in found])
        return counts


@dataclass(frozen=True)
class KeyPlan:
    """How keys and values come to all queries of their item, seen by one rank; rows are patches."""

    give: tuple[Slice, ...]
    """Of this rank's own, in the order in which they are sent."""
    send: tuple[int, ...]
    receive: tuple[int, ...]
    """Rows for and from each rank, this one too."""
    take: tuple[Slice, ...]
    """Of what has come, in the order of the items."""
    lengths: tuple[int, ...]
    """Keys of each item of which this rank has rows."""


def key_plan(assignment: Assignment, rank: int) -> KeyPlan:
    """What a rank gives to the others' queries, and where it finds the keys of its own."""
    holders = [set(assignment.members(item)) for item in range(len(assignment.grids))]
    mine = assignment.pieces(rank)
    starts = _starts(piece.patches for _, piece in mine)
    give: list[Slice] = []
    send, receive = [0] * assignment.ranks, [0] * assignment.ranks
    for other in range(assignment.ranks):
        for start, (item, piece) in zip(starts, mine, strict=False):
            if other in holders[item]:
                give.append((start, start + piece.patches))
                send[other] += piece.patches
    places: dict[tuple[int, int], Slice] = {}
    came = 0
    for other in range(assignment.ranks):
        for item, piece in assignment.pieces(other):
            if rank in holders[item]:
                places[item, other] = came, came + piece.patches
                came += piece.patches
                receive[other] += piece.patches
    take = [places[item, other] for item, _ in mine for other in sorted(holders[item])]
    lengths = tuple(patches(piece.grid) for _, piece in mine)
    return KeyPlan(tuple(_joined(give)), tuple(send), tuple(receive), tuple(_joined(take)), lengths)


def assign(
    vision: VisionConfig, out_size: int, grids: Sequence[Grid], ranks: int, price: float = 0.0
) -> Assignment:
    """Share out items so that the slowest rank has least to do.

    The costliest item comes first. It goes whole to the rank that has least so far, unless that rank would
    have more than a limit: then to twice as many neighbouring ranks, and so on, in shares that level their
    loads. Limits are tried from the lowest on.

    Args:
        out_size: width of the language model.
        price: FLOPs that a rank does in the time in which keys and values of one patch reach it, those of
            all blocks; see `key_price`.

    Raises:
        GridError: the tower cannot take an item.
    """
    assert grids
    for item, grid in enumerate(grids):
        check_grid(vision, grid, item)
    jobs = [_Job.of(vision, out_size, grid, price) for grid in grids]
    order = sorted(range(len(jobs)), key=lambda item: (-jobs[item].cost, item))
    mean = sum(job.cost for job in jobs) / ranks
    tried = []
    for limit in LIMITS:
        loads, shares = _placed(jobs, order, ranks, limit * mean)
        cuts = sum(sum(map(bool, share)) - 1 for share in shares)
        tried.append((round(max(loads) / mean, DIGITS), cuts, shares))
        if not cuts or max(loads) <= limit * mean:
            break
    shares = min(tried, key=lambda each: each[:2])[2]
    loads = [
        sum(job.row * share[rank] for job, share in zip(jobs, shares, strict=True)) for rank in range(ranks)
    ]
    borders = [tuple(vision.merge * row for row in _starts(share)) for share in shares]
    return Assignment(tuple(grids), tuple(borders), tuple(loads))


def key_price(config: Config) -> float:
    """FLOPs of a rank while keys and values of one patch, of all blocks, reach it; see `assign`."""
    cluster, vision, context = config.cluster, config.vision, config.parallel.context
    within = context <= (cluster.ranks_per_node or cluster.gpus_per_node)
    bandwidth = 1e9 * (cluster.link_gbps if within else cluster.network_gbps)
    received = key_bytes(vision, element_bytes(config.model))
    return received / bandwidth * cluster.peak_tflops * TERA * cluster.efficiency.dense_gemm


def key_bytes(vision: VisionConfig, element: int) -> int:
    """Bytes of the keys and values of one patch in all blocks, `element` bytes a number."""
    return vision.depth * 2 * attention_channels(vision) * element


def sent_bytes(config: Config, grids: Sequence[Grid]) -> dict[str, float]:
    """What the busiest context rank sends for a part, forward and backward, by name.

    Features lie anywhere in the rows: all but the N-th that a rank keeps of what it makes.
    """
    vision, ranks, element = config.vision, config.parallel.context, element_bytes(config.model)
    if ranks == 1 or not grids:
        return {}
    found = assign(vision, config.model.hidden_size, grids, ranks, key_price(config))
    forward, backward, made = [0] * ranks, [0] * ranks, [0] * ranks
    for rank in range(ranks):
        for item, piece in found.pieces(rank):
            forward[rank] += piece.patches * (len(found.members(item)) - 1)
            backward[rank] += patches(piece.grid) - piece.patches
            made[rank] += tokens(vision, piece.local)
    keys = max(there + back for there, back in zip(forward, backward, strict=True))
    features = 2 * max(made) * (ranks - 1) / ranks * config.model.hidden_size * element
    return {"vision_keys": keys * key_bytes(vision, element), "vision_features": features}


class _Job(NamedTuple):
    """An item to be placed; costs are FLOPs."""

    rows: int
    """Of merged patches: the unit of a cut."""
    row: float
    """Cost of a row."""
    join: float
    """Of the keys and values of all other rows, to a rank that has none yet."""

    @classmethod
    def of(cls, vision: VisionConfig, out_size: int, grid: Grid, price: float) -> _Job:
        rows = grid[1] // vision.merge
        return cls(rows, image_cost(vision, out_size, grid) / rows, price * patches(grid))

    @property
    def cost(self) -> float:
        return self.row * self.rows

    def load(self, share: int) -> float:
        """What `share` rows add to a rank."""
        if share in (0, self.rows):
            return share * self.row
        return share * self.row + self.join * (self.rows - share) / self.rows


def _placed(
    jobs: Sequence[_Job], order: Sequence[int], ranks: int, limit: float
) -> tuple[list[float], list[list[int]]]:
    """Loads with the price of keys and values, and each item's rows on each rank."""
    loads = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in jobs]
    for item in order:
        job, least = jobs[item], loads.index(min(loads))
        best = loads[least] + job.cost, least, [job.rows]
        for size in _sizes(ranks):
            if best[0] <= limit * (1 + 1e-9):
                break
            best = min(best, min(_in_blocks(job, loads, size)), key=lambda placed: placed[0])
        _, start, rows = best
        shares[item] = [0] * start + rows + [0] * (ranks - start - len(rows))
        for rank, share in enumerate(shares[item]):
            loads[rank] += job.load(share)
    return loads, shares


def _sizes(ranks: int) -> Iterator[int]:
    """Sizes of sub-groups of several ranks: powers of two, and the whole group."""
    size = 2
    while size < ranks:
        yield size
        size *= 2
    if ranks > 1:
        yield ranks


def _in_blocks(job: _Job, loads: Sequence[float], size: int) -> Iterator[tuple[float, int, list[int]]]:
    """(largest load, first rank, rows on each rank) of an item on each sub-group of a size."""
    for start in range(0, len(loads) - size + 1, size):
        block = loads[start : start + size]
        rows = _levelled(job, block)
        yield max(load + job.load(share) for load, share in zip(block, rows, strict=True)), start, rows


def _levelled(job: _Job, loads: Sequence[float]) -> list[int]:
    """An item's rows over ranks so that the largest load is nearly the least."""
    gain = job.row - job.join / job.rows
    if gain <= 0:
        least = min(range(len(loads)), key=loads.__getitem__)
        return [job.rows * (rank == least) for rank in range(len(loads))]
    order, filled = sorted(range(len(loads)), key=loads.__getitem__), 0.0
    for count, rank in enumerate(order, 1):
        filled += loads[rank]
        level = (job.rows * gain + filled) / count
        if count == len(order) or level <= loads[order[count]]:
            break
    shares = [max(0, int((level - load) / gain)) for load in loads]
    while sum(shares) < job.rows:
        after = [load + gain * (share + 1) for load, share in zip(loads, shares, strict=True)]
        shares[after.index(min(after))] += 1
    while sum(shares) > job.rows:
        shares[max(range(len(shares)), key=shares.__getitem__)] -= 1
    return shares


def _starts(lengths: Iterable[int]) -> list[int]:
    """Where each of several lengths starts, one behind another, and the end."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _joined(slices: Iterable[Slice]) -> list[Slice]:
    """Neighbours that follow each other as one."""
    found: list[Slice] = []
    for start, stop in slices:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found

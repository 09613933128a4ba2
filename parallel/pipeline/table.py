"""A pipeline schedule as data: for each rank the list of what it does, in order. Imports no torch.

No times, peers or tensors stand in a table; they follow from it (`messages`, `simulate`). Letters: p pipeline
ranks, v model chunks of a rank, m micro-batches. Stage i of the p * v stages of the forward pass lives on one
rank as one of its chunks; `Layout` says where.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
VISION_FORWARD, VISION_BACKWARD = "VF", "VB"
REDUCE, PREFETCH, RELEASE = "R", "P", "X"
KINDS = (FORWARD, BACKWARD, WEIGHT, VISION_FORWARD, VISION_BACKWARD, REDUCE, PREFETCH, RELEASE)

TOWER = -1
"""Stands where a model chunk would: the vision tower, which every rank holds, in a `REDUCE`."""


class Op(NamedTuple):
    """One thing that a rank does.

    F, B: forward and backward of a chunk for a micro-batch; where W stands in the table, B leaves the
    weights' gradients to it. VF, VB: forward and backward of part `chunk` of a micro-batch's images. R: sum a
    chunk's gradients over its replicas, those of the micro-batches up to this one that no earlier R has
    summed. P and X: bring back, and give away, what a chunk's forward saved for a micro-batch.
    """

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.chunk},{self.microbatch})"


@dataclass(frozen=True)
class Layout:
    """Where the stages live. `vee`: two chunks a rank, the second ones in reverse order of the ranks."""

    pipeline: int
    virtual: int
    microbatches: int
    vee: bool = False

    def __post_init__(self) -> None:
        assert min(self.pipeline, self.virtual, self.microbatches) >= 1, self
        assert not self.vee or self.virtual == 2, "a V has two chunks on each rank"

    @property
    def stages(self) -> int:
        """Stages of the forward pass."""
        return self.pipeline * self.virtual

    def home(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        chunk, rank = divmod(stage, self.pipeline)
        return (self.pipeline - 1 - rank if self.vee and chunk else rank), chunk

    def stage(self, rank: int, chunk: int) -> int:
        """Position of a rank's chunk in the forward pass."""
        place = self.pipeline - 1 - rank if self.vee and chunk else rank
        return chunk * self.pipeline + place


@dataclass(frozen=True)
class Table:
    """Every rank's operations in order.

    `parts[k]` is the number of parts into which the images of micro-batch k are cut; empty without vision.
    """

    layout: Layout
    ranks: tuple[tuple[Op, ...], ...]
    name: str = "custom"
    parts: tuple[int, ...] = ()

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are operations of their own."""
        return any(op.kind == WEIGHT for op in self.ranks[0])

    @cached_property
    def sums(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(rank, chunk) -> last micro-batches of its gradient sums, ascending; the tower's are no part."""
        found: dict[tuple[int, int], list[int]] = {}
        for rank, ops in enumerate(self.ranks):
            for op in ops:
                if op.kind == REDUCE and op.chunk != TOWER:
                    found.setdefault((rank, op.chunk), []).append(op.microbatch)
        return {place: tuple(sorted(ends)) for place, ends in found.items()}

    @cached_property
    def tower_rank(self) -> dict[tuple[int, int], int]:
        """(micro-batch, part) -> the rank that runs its images through the vision tower."""
        return {
            (op.microbatch, op.chunk): rank
            for rank, ops in enumerate(self.ranks)
            for op in ops
            if op.kind == VISION_FORWARD
        }

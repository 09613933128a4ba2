"""What a rehearsed rank says of its objects. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Shape = tuple[int, ...]

KINDS = ("pipeline", "data", "context", "expert", "expert_data")
"""Ways to divide the ranks, as `Topology.groups` names them."""


class Saved(NamedTuple):
    """A rectangle of a tensor of the whole model that a rank writes into checkpoints."""

    key: str
    shape: Shape
    """Of the whole tensor."""
    offset: Shape
    size: Shape
    dtype: str


class Post(NamedTuple):
    """A send or receive of a step, in the order of the program."""

    action: str
    """send or recv."""
    message: str
    """The same text on both sides."""
    peer: int
    """Pipeline rank."""
    width: int
    """Elements of a token that travel; 0 for features of images, whose size is the data's."""


class Trade(NamedTuple):
    """A rank's part in Muon's exchange for one chunk of one optimizer: elements, by rank of the group."""

    group: Shape
    sent: Shape
    received: Shape
    moved: int


@dataclass(frozen=True)
class Stage:
    """A model chunk of a rank."""

    number: int
    """In the order of the forward pass."""
    layers: range
    rows: int
    """Rows of the AttnRes bank that its layers begin."""


@dataclass(frozen=True)
class RankFacts:
    """One rank."""

    rank: int
    groups: dict[str, Shape]
    """Ranks of each of its groups, by kind."""
    seats: dict[str, int]
    """Its place in each."""
    communicators: Shape
    """How many were made, and a number for their order."""
    collectives: dict[Shape, Shape]
    """The same of the collectives of each group while the rank was built."""
    built: bool = False
    """Whether more than the groups was built."""
    stages: tuple[Stage, ...] = ()
    numel: dict[str, int] = field(default_factory=dict)
    """Elements of its parameters: dense, expert, vision."""
    held: dict[str, int] = field(default_factory=dict)
    """Bytes by kind of the plan's ledger, without padding."""
    slack: dict[str, int] = field(default_factory=dict)
    """Bytes by which a kind may exceed the plan: padding, and shards that are cut elsewhere."""
    experts: dict[str, Shape] = field(default_factory=dict)
    """Experts that it holds, by layer, as the whole model numbers them."""
    slots: int = 0
    """For borrowed experts in each layer."""
    saved: tuple[Saved, ...] = ()
    trades: tuple[Trade, ...] = ()
    samples: tuple[int, ...] = ()
    """Of its first step, by their numbers in the run."""
    posts: tuple[Post, ...] | None = None
    """Of a step; None where another rank of the same pipeline place says it."""


@dataclass(frozen=True)
class Problem:
    """Something that would have failed on the cluster."""

    rank: int | None
    what: str
    """The object."""
    text: str

    def __str__(self) -> str:
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        return f"{where}: {self.what}: {self.text}"

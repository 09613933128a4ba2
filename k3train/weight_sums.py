"""Parameters of each layer in sums, for gradients, the update and checkpoints of a rank. Needs no torch.

Layouts of one model share them, so that a search counts a model's parameters once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from parallel.topology import Topology

from .config import Config, ModelConfig
from .optim.groups import ADAMW_KINDS, newton_schulz_flops, split
from .shapes import BYTES, Parameter, compact_parameters

FIRST, LAST = -1, 1 << 20
"""Places of the embedding, before layer 0, and of all that stands behind the last layer."""
KNOWN = 8
"""Models that are kept."""


@dataclass(frozen=True)
class Sums:
    """Of some parameters that are all dense, or all of routed experts."""

    trained: float = 0.0
    """Elements that have a gradient."""
    nbytes: float = 0.0
    """In the model's dtypes."""
    flops: float = 0.0
    """Of Newton-Schulz in a step."""
    blocks: float = 0.0
    """Matrices, or parts of them, that it runs on."""
    largest: float = 0.0
    """FLOPs of the largest of them."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.trained + other.trained,
            self.nbytes + other.nbytes,
            self.flops + other.flops,
            self.blocks + other.blocks,
            max(self.largest, other.largest),
        )

    def share(self, ranks: int) -> Sums:
        """Of one of `ranks` ranks, evenly."""
        return Sums(
            self.trained / ranks, self.nbytes / ranks, self.flops / ranks, self.blocks / ranks, self.largest
        )


Place = tuple[Sums, Sums]
"""Dense parameters, and those of all routed experts."""

_known: OrderedDict[object, dict[int, Place]] = OrderedDict()


def places(config: Config) -> dict[int, Place]:
    """By decoder layer, and `FIRST` and `LAST`."""
    optim = config.optim
    key = repr(config.model), optim.name, optim.muon_steps
    if key not in _known:
        found: dict[int, list[Sums]] = {}
        for entry in compact_parameters(config.model):
            place = found.setdefault(_place(entry), [Sums(), Sums()])
            place[entry.kind == "expert"] += _sums(entry, config)
        _known[key] = {number: (dense, expert) for number, (dense, expert) in found.items()}
        if len(_known) > KNOWN:
            _known.popitem(last=False)
    return _known[key]


def rank_sums(config: Config, topology: Topology, cuts: list[range]) -> list[Place]:
    """Of each pipeline rank: dense parameters, and its share of the experts."""
    known, ranks = places(config), topology.pipeline
    found = []
    for rank in range(ranks):
        dense = expert = Sums()
        for number in range(rank, len(cuts), ranks):
            layers = cuts[number]
            ends = ([FIRST] if number == 0 else []) + ([LAST] if number == len(cuts) - 1 else [])
            for place in [*layers, *ends]:
                dense, expert = dense + known[place][0], expert + known[place][1]
        found.append((dense, expert.share(topology.expert)))
    return found


def _place(entry: Parameter) -> int:
    if entry.layer is not None:
        return entry.layer
    return FIRST if entry.kind == "embedding" else LAST


def _sums(entry: Parameter, config: Config) -> Sums:
    numel = float(entry.numel)
    if not entry.trainable:
        return Sums(nbytes=numel * BYTES[entry.dtype])
    shapes = _blocks(entry, config.optim.name, config.model)
    flops = [newton_schulz_flops(shape, config.optim.muon_steps) for shape in shapes]
    return Sums(
        numel,
        numel * BYTES[entry.dtype],
        sum(flops) * entry.copies,
        float(len(shapes) * entry.copies),
        max(flops, default=0.0),
    )


def _blocks(entry: Parameter, rule: str, model: ModelConfig) -> list[tuple[int, int]]:
    """Matrices of one copy that Newton-Schulz runs on."""
    if rule == "muon_per_head":
        cut = split(entry, model)
        return [] if cut is None else [shape for *_, shape in cut.blocks(entry.shape[1])]
    if rule == "muon" and len(entry.shape) == 2 and entry.kind not in ADAMW_KINDS:
        return [(entry.shape[0], entry.shape[1])]
    return []

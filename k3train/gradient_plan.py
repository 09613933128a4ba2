"""Bytes of gradients on a rank: whole buffers, or ZeRO-2's shards and slots, and whether those pay.

Letters: N elements that a rank's chunks train, d data-parallel ranks (of experts, their own), v chunks of a
rank. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel.pipeline.table import Table
from parallel.topology import Topology
from parallel.zero2 import SLOTS

from .config import Config
from .shapes import Parameter

FP32 = 4


@dataclass(frozen=True)
class Gradients:
    """Of one rank's chunks, in bytes, to the padding of shards."""

    whole: int
    """4 N: every gradient, as ZeRO-1 holds them."""
    shards: int
    """4 N / d."""
    slots: int
    """2 x 4 x the largest chunk; once where a rank has a single chunk, which is summed once a step."""

    def on_device(self, store: str) -> int:
        """Under ZeRO-2 with shards on `store`."""
        return self.slots + (self.shards if store == "device" else 0)

    @property
    def relative(self) -> dict[str, float]:
        """ZeRO-2's device memory over ZeRO-1's, for shards on the device and elsewhere; below 1 it pays."""
        whole = max(self.whole, 1)
        return {"device": (self.shards + self.slots) / whole, "host": self.slots / whole}


def rank_gradients(topology: Topology, chunks: Sequence[Iterable[Parameter]]) -> Gradients:
    """What the chunks of a rank need."""
    sizes, shards = [], 0
    for entries in chunks:
        numel = 0
        for entry in entries:
            if entry.trainable:
                numel += local_numel(entry, topology)
                shards += FP32 * math.ceil(local_numel(entry, topology) / replicas(entry, topology))
        sizes.append(numel)
    slots = min(SLOTS, len(sizes)) * max(sizes)
    return Gradients(FP32 * sum(sizes), shards, FP32 * slots)


def local_numel(entry: Parameter, topology: Topology) -> int:
    """Elements of an entry on one of the ranks that hold it."""
    return entry.numel // topology.expert if entry.kind == "expert" else entry.numel


def replicas(entry: Parameter, topology: Topology) -> int:
    """Ranks of a stage that hold the same elements of an entry and sum its gradient."""
    return topology.expert_data if entry.kind == "expert" else topology.data * topology.context


def equal_chunks(topology: Topology) -> dict[str, float]:
    """`Gradients.relative` of equal chunks without experts: 1/d + 2/v on the device, 2/v elsewhere."""
    slots = min(SLOTS, topology.virtual) / topology.virtual
    return {"device": 1 / (topology.data * topology.context) + slots, "host": slots}


def bursts(table: Table, rank: int, chunk: int) -> int:
    """Times that a chunk's gradients are summed in a step."""
    return len(table.sums.get((rank, chunk), (0,)))


def costs_more(config: Config, ranks: Sequence[Gradients]) -> str | None:
    """Why ZeRO-2 holds more than ZeRO-1 on the rank with the most gradients, or None."""
    if config.parallel.zero != 2:
        return None
    store = config.offload.gradients
    needed, whole = max(rank.on_device(store) for rank in ranks), max(rank.whole for rank in ranks)
    if needed < whole:
        return None
    remedy = "parallel.zero=1" if store != "device" else "parallel.zero=1 or offload.gradients=host"
    return (
        f"parallel.zero=2 holds {needed / 2**20:,.1f} MiB of gradients where ZeRO-1 holds "
        f"{whole / 2**20:,.1f} MiB: it pays with more chunks on a rank (parallel.virtual); else use {remedy}"
    )

"""What gradient sums below the device move in a step of ZeRO-2, and how long that takes. Needs no torch.

A chunk's gradients are summed several times in a step. Each sum leaves the device as this rank's shards; on
the host they are added to what is there, on a disk what is there is read and written for it. Before the
update the shards come back. Bytes are those of the fullest rank; headers of files are left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from parallel.topology import Topology
from parallel.zero2 import SLOTS

from .config import Config
from .operators import GIGA
from .weight_sums import Place

FP32 = 4


class Moves(NamedTuple):
    """Bytes of a step."""

    out: float
    """From the device to the host."""
    back: float
    read: float
    """From the disk."""
    written: float


class Seconds(NamedTuple):
    """Of a step's moves."""

    beside: float
    """Of all sums but the last: other chunks' backwards run at the same time."""
    last: float
    """Of the last sum, behind which the update waits."""
    back: float


def sums_in_a_step(config: Config) -> int:
    """How often the first rank sums the gradients of some chunk: once for each turn to another chunk."""
    parallel = config.parallel
    if parallel.virtual == 1:
        return 1
    group = parallel.microbatch_group or parallel.pipeline
    return parallel.virtual * max(1, -(-config.run.microbatches // group))


def fetches(config: Config, topology: Topology, ranks: list[Place]) -> int:
    """How often shards come back: AdamW reads them for the norm and for the update, unless both slots hold
    all of them; Per-Head Muon keeps them on the device for both."""
    if config.optim.name != "adamw":
        return 1
    windows = max(
        math.ceil(topology.virtual * _elements(topology, place) / whole)
        for place in ranks
        if (whole := sum(sums.trained for sums in place))
    )
    return 1 if windows <= SLOTS else 2


def moves(shards: float, sums: int, times_back: int, store: str) -> Moves:
    """Of `shards` bytes that are summed `sums` times each, and read `times_back` times."""
    disk = store == "nvme"
    return Moves(
        out=shards * sums,
        back=shards * times_back,
        # The first sum of a step takes the place of the last step's.
        read=shards * (sums - 1 + times_back) * disk,
        written=shards * sums * disk,
    )


def of_step(config: Config, topology: Topology, ranks: list[Place]) -> Moves:
    """Of the fullest rank; nothing where gradients stay on the device."""
    store = config.offload.gradients
    if config.parallel.zero != 2 or store == "device":
        return Moves(0.0, 0.0, 0.0, 0.0)
    shards = FP32 * max(_elements(topology, place) for place in ranks)
    each = sums_in_a_step(config) // topology.virtual
    return moves(shards, each, fetches(config, topology, ranks), store)


def seconds(config: Config, topology: Topology, ranks: list[Place]) -> Seconds:
    """Copies and the disk work at the same time, and a disk reads and writes in turn."""
    found, cluster = of_step(config, topology, ranks), config.cluster
    if not found.out:
        return Seconds(0.0, 0.0, 0.0)
    host, read, write = (
        GIGA * rate for rate in (cluster.host_gbps, cluster.nvme_read_gbps, cluster.nvme_write_gbps)
    )
    fetched = found.back if found.read else 0.0
    added = max(found.out / host, (found.read - fetched) / read + found.written / write)
    last = added / sums_in_a_step(config)
    return Seconds(added - last, last, found.back / host + fetched / read)


def _elements(topology: Topology, place: Place) -> float:
    """Of a rank's shards."""
    shares = (topology.data * topology.context, topology.expert_data)
    return sum(sums.trained / ranks for sums, ranks in zip(place, shares, strict=True))

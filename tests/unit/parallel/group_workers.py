"""What the ranks of the group tests do."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from parallel.groups import RankMismatchError, assert_same_everywhere, destroy, initialize
from parallel.topology import Topology


def alone() -> dict[str, Any]:
    """Join and leave twice, without a word from torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    groups = initialize(Topology(), timeout_minutes=1, seed=1)
    answer = {"world": dist.get_world_size(), "device": groups.device.type}
    destroy()
    initialize(Topology(), timeout_minutes=1, seed=1)
    destroy()
    return {**answer, "again": not dist.is_initialized()}


def memberships(**sizes: int) -> dict[str, Any]:
    """This rank's groups beside those that the topology computes."""
    topology = Topology(**sizes)
    groups = initialize(topology, timeout_minutes=1, seed=1)
    collection = groups.pg_collection
    joined = {
        "pipeline": collection.pp,
        "data": collection.dp,
        "context": collection.cp,
        "expert": collection.ep,
        "expert_data": collection.expt_dp,
    }
    compared = [
        (kind, dist.get_process_group_ranks(group), _mine(topology, kind, groups.rank))
        for kind, group in joined.items()
    ]
    destroy()
    return {"rank": groups.rank, "groups": compared}


def _mine(topology: Topology, kind: str, rank: int) -> list[int]:
    return next(group for group in topology.groups(kind) if rank in group)


def compare(digests: list[str]) -> str:
    """What comparing each rank's digest says."""
    groups = initialize(Topology(data=len(digests)), timeout_minutes=1, seed=1)
    try:
        assert_same_everywhere("configuration", digests[groups.rank])
    except RankMismatchError as error:
        return str(error)
    finally:
        destroy()
    return "same"


def die() -> None:
    """Rank 1 leaves without a word while rank 0 waits for it."""
    groups = initialize(Topology(data=2), timeout_minutes=10, seed=1)
    if groups.rank == 1:
        os._exit(7)
    dist.barrier()

"""The activation manager of a run, built from the configuration, and what it measured; part of `assemble`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from offload import fp8
from offload.manager import ActivationManager
from offload.policy import KEEP
from offload.tiers import open_tiers
from offload.tiers.peer import Peers
from parallel.groups import Groups
from parallel.pipeline.clock import Event

from ..activation_plan import TierPlan, tier_plan
from ..activation_policy import policy_of, policy_of_rank
from ..config import Config
from ..model.transformer_config import DTYPES

FILE = "activations.jsonl"
_opened = itertools.count()
"""Managers of this process; all ranks build theirs in one order."""


def build_activations(config: Config, groups: Groups, modules: list[Any]) -> ActivationManager | None:
    """None where every site keeps what it saves. A collective over the ranks of a pipeline."""
    if all(storage == KEEP for storage in policy_of(config).values()):
        return None
    rank, offload, device = groups.pg_collection.pp.rank(), config.offload, groups.device
    below = policy_of(config).tiers()
    room = tier_plan(config, groups.topology)[rank] if below else TierPlan({}, None, 0)
    tiers = open_tiers(
        room.capacities,
        device,
        nvme_dir=None if offload.nvme_dir is None else Path(offload.nvme_dir),
        peers=_peers(groups, room) if "peer" in below else None,
        fallback=offload.on_failure == "fallback",
        warn=_warn,
    )
    return ActivationManager(
        policy_of_rank(config, rank),
        tiers,
        parameters=[parameter for module in modules for parameter in module.parameters()],
        device=device,
        codec=fp8,
        coded=DTYPES[config.model.dtype],
        window=offload.inflight_mib << 20,
        smallest=offload.min_kib << 10,
        held="attn_res.bank",
        random=False,
    )


def _peers(groups: Groups, room: TierPlan) -> Peers:
    group = groups.pg_collection.pp
    first = dist.get_process_group_ranks(group)[0]
    store = dist.PrefixStore(
        f"activations/{next(_opened)}/{first}", dist.distributed_c10d._get_default_store()
    )
    return Peers(store, group.rank(), lender=room.lender, lends=room.lends)


def record(events: list[Event], series: list[tuple[str, dict[str, int]]], rank: int, step: int) -> list[str]:
    """A JSON line for each operation of a measured step: bytes that are held behind it, by place."""
    return [
        json.dumps({"step": step, "rank": rank, "op": op, "seconds": end, "bytes": held})
        for (op, held), (*_, end) in zip(series, events, strict=True)
    ]


def _warn(problem: str) -> None:
    print(f"k3train: rank {dist.get_rank()}: {problem}", file=sys.stderr, flush=True)

"""How a configuration holds activations until their backward. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from offload.policy import Policy, PolicyError, Storage

from .config import Config
from .errors import UserError

BUDGET = "budget"
"""Name of the policy that `offload.budget_gb` finds."""

LAYER, MTP_LAYER, TOWER_LAYER = "layer", "mtp.layer", "vit.layer"
"""Sites of whole layers of the decoder, of MTP and of the vision tower."""


def policy_of(config: Config) -> Policy:
    """The policy of a configuration whose `offload.resolved` has been read. Raises UserError."""
    offload = config.offload
    return _policy(tuple(offload.resolved.items()), tuple(offload.sites.items()), offload.policy)


@lru_cache(maxsize=32)
def _policy(base: tuple[tuple[str, str], ...], sites: tuple[tuple[str, str], ...], name: str) -> Policy:
    try:
        named = Policy.read(dict(base))
    except PolicyError as error:
        raise UserError(f"offload.policy={name}: {error}") from None
    try:
        return Policy(Policy.read({}, dict(sites)).sites, named.base)
    except PolicyError as error:
        raise UserError(f"offload.sites.{error}") from None


def lender(rank: int, ranks: int) -> int | None:
    """The pipeline rank whose memory a rank borrows: early ranks hold most, and borrow of the last ones."""
    partner = ranks - 1 - rank
    return partner if rank < partner else None


def peers_meet(config: Config) -> bool:
    """Whether every rank that borrows finds its lender on its own node."""
    parallel, cluster = config.parallel, config.cluster
    node = cluster.ranks_per_node or cluster.gpus_per_node
    ranks, others = parallel.pipeline, (parallel.data or 1) * parallel.context
    pairs = [(rank, partner) for rank in range(ranks) if (partner := lender(rank, ranks)) is not None]
    return all(
        (first * others + other) // node == (last * others + other) // node
        for first, last in pairs
        for other in range(others)
    )


def policy_of_rank(config: Config, rank: int) -> Policy:
    """What a pipeline rank does of the policy: one that borrows nothing keeps what would go to a peer."""
    policy = policy_of(config)
    if lender(rank, config.parallel.pipeline) is not None or "peer" not in policy.tiers():
        return policy
    halves = (
        {name: _at_home(storage) for name, storage in half.items()} for half in (policy.sites, policy.base)
    )
    return Policy(*halves)


def _at_home(storage: Storage) -> Storage:
    return replace(storage, tier=None) if storage.tier == "peer" else storage


def recomputes(config: Config, site: str) -> bool:
    """Whether a site is run again in backward."""
    return policy_of(config).storage(site).recompute


def with_storage(config: Config, changes: Mapping[str, str]) -> dict[str, str]:
    """`offload.resolved` with other storages of some sites, which no pattern hides."""
    return {**config.offload.resolved, **changes}

"""Refuses policies of activations that cannot work, before any process group exists. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from offload.policy import KEEP, TIERS, Policy, PolicyError, Storage, check_sites

from .activation_policy import BUDGET, LAYER, MTP_LAYER, TOWER_LAYER, peers_meet, policy_of
from .activation_sites import SITES, Site, sites
from .config import Config
from .errors import UserError

WHOLE = {LAYER, MTP_LAYER, TOWER_LAYER}
ALLOWED = ("recompute", "fp8", *TIERS)
"""What a budget may choose beside keep."""


def check_policy(config: Config, world_size: int) -> None:
    """Refuse a policy that cannot be read or cannot work on this layout. Raises UserError."""
    policy = policy_of(config)
    known = sites(config)
    _check_names(config, policy)
    for half, key in (
        (policy.sites, "offload.sites."),
        (policy.base, f"offload.policy={config.offload.policy}: "),
    ):
        for pattern, storage in half.items():
            _check_meaning(known, f"{key}{pattern}={storage}", pattern, storage)
            _check_storage(config, f"{key}{pattern}={storage}", storage)
    _check_budget(config)
    _check_layers(config, policy)


def _check_names(config: Config, policy: Policy) -> None:
    """A site of another model is no mistake: recipes and policies are for more than one."""
    names = [site.name for site in SITES]
    for half, key in (
        (policy.sites, "offload.sites."),
        (policy.base, f"offload.policy={config.offload.policy}: "),
    ):
        try:
            check_sites(Policy(half), names)
        except PolicyError as error:
            raise UserError(f"{key}{error}") from None


def _check_meaning(known: Sequence[Site], said: str, pattern: str, storage: Storage) -> None:
    """Refuse what no site that a pattern names can do."""
    named = [site for site in known if fnmatchcase(site.name, pattern)]
    if storage.recompute and named and not any(site.is_region for site in named):
        part = named[0].name.rpartition(".")[0]
        near = [site.name for site in known if site.is_region and site.name.rpartition(".")[0] == part]
        regions = f"the regions there are {', '.join(near)}" if near else "docs/offload.md lists the regions"
        raise UserError(f"{said}: cannot be run again by itself; {regions}")
    if storage != KEEP and not storage.recompute and {site.name for site in named} <= WHOLE and named:
        raise UserError(f"{said}: what is inside has sites of its own; add recompute+, or name those")


def _check_storage(config: Config, said: str, storage: Storage) -> None:
    offload = config.offload
    if storage.tier == "nvme" and not (offload.nvme_dir or "").strip():
        raise UserError(f"{said}: needs a disk: set offload.nvme_dir to a folder on a fast local one")
    if storage.tier == "peer" and config.parallel.pipeline == 1:
        raise UserError(
            f"{said}: needs the memory of another pipeline rank; use host, or parallel.pipeline=2"
        )
    if storage.tier == "peer" and not peers_meet(config):
        raise UserError(f"{said}: early and late pipeline ranks are on different nodes; use host or nvme")
    if storage.tier and getattr(offload, f"{storage.tier}_gb") == 0:
        raise UserError(f"{said}: offload.{storage.tier}_gb=0 leaves no room; raise it, or leave it out")


def _check_budget(config: Config) -> None:
    budget, name, allow = config.offload.budget_gb, config.offload.policy, config.offload.allow
    if any(each not in ALLOWED for each in allow):
        raise UserError(f"offload.allow=[{','.join(allow)}]: valid is a list of {', '.join(ALLOWED)}")
    if budget is not None and budget <= 0:
        raise UserError(f"offload.budget_gb={budget:g}: must be above 0")
    if name == BUDGET and budget is None:
        raise UserError(f"offload.policy={BUDGET}: is what a budget finds; set offload.budget_gb")
    if budget is not None and name not in (BUDGET, "keep"):
        raise UserError(
            f"offload.budget_gb={budget:g}: chooses the policy, and offload.policy={name}; leave one of them "
            "out (offload.sites fixes single ones)"
        )


def _check_layers(config: Config, policy: Policy) -> None:
    group = config.offload.recompute_layers
    if group > 1 and not policy.storage(LAYER).recompute and config.offload.budget_gb is None:
        raise UserError(
            f"offload.recompute_layers={group}: no layer is run again; add offload.policy=recompute, or "
            "leave it out"
        )


def check_disk(config: Config, world_size: int) -> None:
    """Refuse `offload.nvme_dir` where files cannot be made in it, whoever uses it. Raises UserError."""
    folder = config.offload.nvme_dir
    if folder is None or not _uses_disk(config):
        return
    path = Path(folder).expanduser().absolute()
    existing = next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())
    if not existing.is_dir():
        raise UserError(f"offload.nvme_dir={folder}: {existing} is not a folder; name another")
    if existing not in (path, path.parent):  # a disk that is not mounted, or a slip
        raise UserError(
            f"offload.nvme_dir={folder}: there is no {path.parent}; make it, or name another folder"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"offload.nvme_dir={folder}: {existing} cannot be written; name another folder")


def _uses_disk(config: Config) -> bool:
    offload = config.offload
    return "nvme" in (offload.gradients, offload.optimizer) or "nvme" in policy_of(config).tiers()

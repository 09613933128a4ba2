"""The tiers of a rank, and which takes over when one is full or fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from . import OffloadError, Parcel, Tier, TierFull
from .host import open_host
from .nvme import NvmeTier
from .peer import Loan, Peers, open_peer

NEXT = {"nvme": "host", "peer": "host", "host": None}
"""None: the tensor stays on the device."""
STAYS = "the device"


class Tiers:
    """Puts a parcel where it should go, or into the next tier that can take it.

    A tier that is full is asked again for the next parcel; one that failed is not. Either is told once.
    """

    def __init__(self, tiers: Mapping[str, Tier], *, fallback: bool, warn: Callable[[str], None]) -> None:
        self.tiers = dict(tiers)
        self.loan: Loan | None = None
        self._fallback, self._warn = fallback, warn
        self._failed: set[str] = set()
        self._told: set[str] = set()

    @classmethod
    def open(
        cls,
        capacities: Mapping[str, int],
        device: torch.device,
        *,
        nvme_dir: Path | None,
        peers: Peers | None,
        fallback: bool,
        warn: Callable[[str], None],
    ) -> Tiers:
        """See `open_tiers`."""
        made = cls({}, fallback=fallback, warn=warn)
        if peers is not None and peers.lends:
            made.loan = Loan(peers, device)
            if made.loan.problem:
                made._cannot("loan", OffloadError(f"{made.loan.problem}; lower offload.peer_gb"), "nothing")
        openers: dict[str, Callable[[int], Tier]] = {
            "host": lambda capacity: open_host(capacity, device),
            "peer": lambda capacity: _open_peer(peers, capacity, device),
            "nvme": lambda capacity: _open_nvme(nvme_dir, capacity, device, fallback),
        }
        for name, opener in openers.items():
            lends_only = name == "peer" and peers is not None and peers.lender is None
            if capacities.get(name) and not lends_only:
                try:
                    made.tiers[name] = opener(capacities[name])
                except OffloadError as error:
                    made._cannot(name, error, made._after(name) or STAYS)
                    made._failed.add(name)
        return made

    def put(self, name: str, source: Tensor) -> Parcel | None:
        """Store uint8 [n] in a tier or one behind it; None: in none, it stays on the device.

        Raises:
            OffloadError: the tier cannot take it, and no other may take over.
        """
        tier: str | None = name
        while tier is not None:
            if tier in self.tiers and tier not in self._failed:
                try:
                    return self.tiers[tier].put(source)
                except TierFull as error:
                    self._cannot(tier, error, self._after(tier) or STAYS)
                except OffloadError as error:
                    self._failed.add(tier)
                    self._cannot(tier, error, self._after(tier) or STAYS)
            tier = NEXT[tier]
        return None

    def used(self) -> dict[str, int]:
        """Bytes that each tier holds now."""
        return {name: tier.used for name, tier in self.tiers.items()}

    def describe(self) -> list[str]:
        """A line for each tier that is used."""
        return [f"{name}: {tier.describe()}" for name, tier in self.tiers.items()]

    def close(self) -> None:
        """Close all tiers; what this rank lends last, after its borrower has closed."""
        for tier in self.tiers.values():
            tier.close()
        if self.loan is not None:
            self.loan.close()

    def _after(self, name: str) -> str | None:
        """The next tier that can be used."""
        behind = NEXT[name]
        while behind is not None and (behind not in self.tiers or behind in self._failed):
            behind = NEXT[behind]
        return behind

    def _cannot(self, name: str, error: OffloadError, instead: str) -> None:
        """Tell once what goes elsewhere, or stop."""
        if not self._fallback:
            raise type(error)(f"{error}; or set offload.on_failure=fallback") from error
        if name not in self._told:
            self._told.add(name)
            self._warn(f"{error}" if name == "loan" else f"{error}; {instead} takes what would go there")


def _open_peer(peers: Peers | None, capacity: int, device: torch.device) -> Tier:
    if peers is None:
        raise OffloadError("no rank of this host lends memory; use an offload.policy without peer")
    return open_peer(peers, device)


def _open_nvme(folder: Path | None, capacity: int, device: torch.device, fallback: bool) -> Tier:
    if folder is None:
        raise OffloadError("no disk is known; set offload.nvme_dir to a folder on a fast local one")
    return NvmeTier(folder.expanduser(), capacity, device, keep_failed=fallback)

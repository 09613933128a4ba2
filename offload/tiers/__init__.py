"""Where tensors saved for backward are put: host memory, another GPU's memory, a file on NVMe.

A tier takes bytes from the device beside the computation (`put`) and gives them back (`Parcel.fetch`,
`take`). Copies run on streams of their own, ordered by events; a fetched tensor comes from the allocator of
the caller's current stream. On a CPU "the device" is host memory, and the same code runs without streams.

Letters: n bytes of a parcel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import OffloadError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .chain import Tiers
    from .peer import Peers

__all__ = ["OffloadError", "Parcel", "Tier", "TierFull", "open_tiers", "report"]


class TierFull(OffloadError):
    """A tier has no room for a parcel now; it may have some later."""


class Parcel(Protocol):
    """Bytes that a tier holds. A parcel and its tier are used by one thread at a time."""

    nbytes: int
    """As stored, see `sizes.stored_bytes`."""
    tier: str

    def wait_stored(self) -> None:
        """The current stream goes on behind the copy out; the source may be freed or used again afterwards.

        Where a tier is slower than the device this is also where the host waits for it. Raises OffloadError.
        """
        ...

    def is_stored(self) -> bool:
        """Whether the copy out is done, without waiting."""
        ...

    def fetch(self) -> None:
        """Start to bring the bytes back; again is no harm. Does not wait for them. Raises OffloadError."""
        ...

    def take(self) -> Tensor:
        """The bytes, uint8 [n] on the device; the current stream goes on behind the copy. Fetches if need be.

        Raises OffloadError: they are lost.
        """
        ...

    def free(self) -> None:
        """Give the place back; in any state, also before a copy has ended, and again."""
        ...


class Tier(Protocol):
    """Memory below the device. Counts are bytes."""

    name: str
    capacity: int

    @property
    def used(self) -> int:
        """What parcels occupy."""
        ...

    @property
    def peak(self) -> int:
        """The most that they occupied at a time."""
        ...

    def put(self, source: Tensor) -> Parcel:
        """Start to store uint8 [n], contiguous, which must stay until `Parcel.wait_stored`.

        Raises TierFull, or OffloadError when the tier cannot be used any more.
        """
        ...

    def describe(self) -> str:
        """What is used, where and how, in one line."""
        ...

    def close(self) -> None:
        """Give everything back; no parcel is used any more."""
        ...


def open_tiers(
    capacities: Mapping[str, int],
    device: torch.device,
    *,
    nvme_dir: Path | None = None,
    peers: Peers | None = None,
    fallback: bool = True,
    warn: Callable[[str], None],
) -> Tiers:
    """Open the tiers that have a capacity in bytes: "host", "peer" (what this rank borrows), "nvme".

    A rank that lends (`Peers.lends`) opens its loan here too, so no rank may wait for another before.
    A rank that borrows from nobody has no peer tier, and says nothing: the next one is used.
    What cannot be opened is replaced by the next tier of `chain.NEXT`, with one warning, if `fallback`.

    Raises:
        OffloadError: a tier cannot be opened, and no other may take over.
    """
    from .chain import Tiers

    return Tiers.open(capacities, device, nvme_dir=nvme_dir, peers=peers, fallback=fallback, warn=warn)


def report() -> list[tuple[str, bool, str]]:
    """(tier or placement, whether it can be used here, why not) of each; engines: `files.engine.report`."""
    import torch

    from .numa import placement
    from .peer import why_no_gpu_reaches_another

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    placed, node = placement(device)
    reason = why_no_gpu_reaches_another() if device.type == "cuda" else "no GPU: through shared memory"
    return [
        ("host", True, ""),
        ("peer", reason is None, reason or ""),
        ("numa", placed, "" if placed else node),
    ]

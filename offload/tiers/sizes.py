"""Bytes that a parcel occupies in a tier. Needs no torch: a plan counts with it."""

from __future__ import annotations

from ..files.alignment import ALIGNMENT, round_up

GRAIN = 512
"""Places in memory begin at multiples of it."""
PIECE = 16 << 20
"""Payload of one block of a file: large enough for a disk's full rate, and the unit of staging."""


def stored_bytes(tier: str, nbytes: int) -> int:
    """What a parcel of `nbytes` occupies in "host", "peer" or "nvme", headers of its blocks included."""
    if tier != "nvme":
        return round_up(nbytes, GRAIN)
    return round_up(nbytes) + -(-nbytes // PIECE) * ALIGNMENT

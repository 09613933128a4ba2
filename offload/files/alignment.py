"""What O_DIRECT asks of addresses, offsets and sizes. Needs no torch: a plan counts bytes with it."""

from __future__ import annotations

ALIGNMENT = 4096


def round_up(nbytes: int, multiple: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-nbytes // multiple) * multiple

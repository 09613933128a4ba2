"""Where experts live: physical expert x is at place x % P of rank x // P.

Letters: E experts, R ranks, P = E/R. Lists over logical experts, which are what the router and checkpoints
number. Neighbours may be popular together; dealing experts out like cards keeps them apart.
"""

from __future__ import annotations

from collections.abc import Sequence


def dealt(experts: int, ranks: int) -> list[int]:
    """Physical number of each logical expert e: rank e % R, place e // R.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    places = _places(experts, ranks)
    return [e % ranks * places + e // ranks for e in range(experts)]


def blockwise(experts: int, ranks: int) -> list[int]:
    """Physical number of each logical expert: its own, so neighbours share a rank.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    _places(experts, ranks)
    return list(range(experts))


def inverse(physical: Sequence[int]) -> list[int]:
    """The logical expert at each physical number."""
    logical = [-1] * len(physical)
    for expert, place in enumerate(physical):
        assert logical[place] < 0, f"experts {logical[place]} and {expert} share place {place}"
        logical[place] = expert
    return logical


def _places(experts: int, ranks: int) -> int:
    if ranks < 1 or experts % ranks:
        raise ValueError(f"{experts} experts on {ranks} ranks: the ranks must divide the experts")
    return experts // ranks

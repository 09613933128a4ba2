"""Cutting a plan into waves of few slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.moonep.waves import Wave, wave_size, waves


def route(rank: int) -> Any:
    """Two ranks of three experts; rank 0 borrows three, rank 1 one. Ends of either rank's six segments."""
    ends = [[4, 4, 6, 9, 10, 14], [2, 5, 9, 11, 11, 11]]
    sizes = SimpleNamespace(slots=[[3, 4, 5], [1]], ends=ends[rank])
    plan = SimpleNamespace(rank=rank, ends=torch.tensor(ends, dtype=torch.int32))
    return SimpleNamespace(sizes=sizes, places=3, plan=plan)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_waves_cover_every_row_once(rank: int, slots: int) -> None:
    cut = waves(route(rank), slots)
    assert len(cut) == 3
    assert [wave.home for wave in cut] == [True] + [False] * (len(cut) - 1)
    place = 0
    for wave in cut:
        assert wave.rows.start == place
        place = wave.rows.stop
        assert sum(wave.segments.counts) == place - wave.rows.start
        assert all(len(experts) <= slots for experts in wave.wanted)
        assert wave.segments.ends.tolist() == torch.tensor(wave.segments.counts).cumsum(0).tolist()
    assert place == [14, 11][rank]
    for other, experts in enumerate(([3, 4, 5], [1])):
        assert [expert for wave in cut for expert in wave.wanted[other]] == experts


@pytest.mark.parametrize(
    ("most", "slots", "size"),
    [(0, 4, 1), (1, 4, 1), (2, 4, 2), (2, 1, 1), (3, 1, 1), (3, 4, 1), (16, 32, 4), (16, 4, 2), (16, 2, 1)],
)
def test_two_waves_fit_into_the_slots(most: int, slots: int, size: int) -> None:
    assert wave_size(most, slots) == size
    assert slots == 1 or most <= 2 or 2 * size <= slots


def test_a_rank_that_borrows_less_has_empty_waves() -> None:
    first, *rest = waves(route(1), 1)
    assert first.segments.counts == [2, 3, 4, 2]
    assert all(isinstance(wave, Wave) and wave.empty and not wave.segments.counts for wave in rest)

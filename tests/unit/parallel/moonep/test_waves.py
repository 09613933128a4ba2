"""Cutting a plan into waves of few slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parallel.moonep.transport import Pending
from parallel.moonep.waves import BorrowedExperts, Wave, wave_size, waves


def route(rank: int, lent: bool = True) -> Any:
    """Two ranks of three experts; rank 0 borrows three, rank 1 one, if `lent`. Ends of their six segments."""
    ends = [[4, 4, 6, 9, 10, 14], [2, 5, 9, *([11] * 3 if lent else [9] * 3)]]
    sizes = SimpleNamespace(slots=[[3, 4, 5], [1] if lent else []], ends=ends[rank])
    plan = SimpleNamespace(rank=rank, ends=torch.tensor(ends, dtype=torch.int32))
    return SimpleNamespace(sizes=sizes, places=3, plan=plan)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_waves_cover_every_row_once(rank: int, slots: int) -> None:
    cut = waves(route(rank), slots)
    assert [wave.home for wave in cut] == [slice(0, 3)] + [slice(3, 3)] * 3
    assert [wave.most for wave in cut] == [0, 1, 1, 1]
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
    first, second, *rest = waves(route(1), 1)
    assert (first.segments.counts, second.segments.counts) == ([2, 3, 4], [2])
    assert all(isinstance(wave, Wave) and wave.empty and not wave.segments.counts for wave in rest)


def test_a_rank_that_lends_spreads_its_rows() -> None:
    """Nine rows of experts with 2, 3 and 4: where the runs of rows reach 9/4, 18/4 and 27/4."""
    cut = waves(route(1, lent=False), 3)
    assert [wave.home for wave in cut] == [slice(0, 2), slice(2, 2), slice(2, 3), slice(3, 3)]
    assert [wave.rows for wave in cut] == [slice(0, 5), slice(5, 5), slice(5, 9), slice(9, 9)]
    assert [wave.segments.ends.tolist() for wave in cut] == [[2, 5], [], [4], []]


class Fetches:
    """A transport that notes which experts were asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def fetch_experts(self, wanted: Any, own: Any) -> Pending[list[torch.Tensor]]:
        """Copies by number."""
        self.asked.append(wanted[0])
        return Pending((), lambda: [torch.tensor(float(expert)) for expert in wanted[0]])


@pytest.mark.parametrize(("slots", "asked"), [(1, [1, 1, 2, 3]), (2, [2, 2, 3, 3]), (3, [3, 3, 3, 3])])
def test_experts_are_fetched_as_far_ahead_as_the_slots_hold_them(slots: int, asked: list[int]) -> None:
    """Waves asked for when each one is computed; both projections of a wave are."""
    transport, own = Fetches(), [[torch.tensor(float(place)) for place in range(3)]] * 2
    cut = waves(route(0), slots)
    experts = BorrowedExperts(cast(Any, transport), cut, slots, cast(Any, own))
    found = []
    for (wave, w1, w2), known in zip(experts, asked, strict=True):
        assert len(transport.asked) == 2 * known
        assert w1 == w2 and len(w1) == len(wave.segments.counts)
        found += [int(weight) for weight in w1]
    assert found == [0, 1, 2, 3, 4, 5]

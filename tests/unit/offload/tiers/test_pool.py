"""Places in a region: disjoint, found again at once, and packed when room gets short."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.tiers import TierFull
from offload.tiers.pool import Place, Pool
from offload.tiers.sizes import GRAIN, PIECE, stored_bytes


def test_a_place_of_the_same_size_is_used_again() -> None:
    pool = Pool(10_000, 100)
    first, second = pool.take(150), pool.take(300)
    assert (first, second) == (Place(0, 200), Place(200, 300))
    pool.give(first)
    assert pool.take(101) == first and pool.used == 500 and pool.peak == 500


def test_neighbours_are_merged_only_when_the_end_is_reached() -> None:
    pool = Pool(600, 100)
    places = [pool.take(100) for _ in range(6)]
    for place in places[1:4]:
        pool.give(place)
    with pytest.raises(TierFull, match="300 of 600 bytes are in use, 400 more are needed"):
        pool.take(400)
    assert pool.take(200) == Place(100, 200)
    assert pool.take(100) == Place(300, 100)
    pool.give(places[5])
    pool.give(places[4])
    assert pool.take(200) == Place(400, 200)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=200), st.integers(1000, 8000))
def test_places_never_overlap(steps: list[tuple[bool, int]], capacity: int) -> None:
    pool, held = Pool(capacity, 64), []
    for is_take, number in steps:
        if is_take:
            try:
                held.append(pool.take(number))
            except TierFull:
                continue
        elif held:
            pool.give(held.pop(number % len(held)))
        ordered = sorted(held, key=lambda place: place.offset)
        assert all(one.end <= other.offset for one, other in itertools.pairwise(ordered))
        assert all(place.offset >= 0 and place.end <= pool.capacity for place in held)
        assert pool.used == sum(place.nbytes for place in held) <= pool.peak <= capacity
    for place in held:
        pool.give(place)
    assert pool.take(pool.capacity) == Place(0, pool.capacity), "all of it is one span again"


@pytest.mark.parametrize("seed", range(5))
def test_a_pipeline_schedule_fits_in_little_more_than_it_needs(seed: int) -> None:
    """Two model chunks of four layers each, forward and backward interleaved: at most 4 % are lost."""
    sizes = random.Random(seed)
    layer, last = ([sizes.randrange(1 << 16, 1 << 24) for _ in range(12)] for _ in range(2))
    chunks = [layer * 4, layer * 3 + last]
    order = [(chunk, "F") for chunk in (0, 0, 1, 1, 0, 0, 1, 1)]
    order += [(chunk, kind) for chunk in (1, 0) * 6 for kind in "FB"]
    order += [(chunk, "B") for chunk in (1, 1, 1, 1, 0, 0, 0, 0)]

    def run(pool: Pool, steps: int) -> None:
        waiting: list[list[list[Place]]] = [[], []]
        for chunk, kind in order * steps:
            if kind == "F":
                waiting[chunk].append([pool.take(size) for size in chunks[chunk]])
            else:
                for place in reversed(waiting[chunk].pop(0)):
                    pool.give(place)

    free = Pool(1 << 40, GRAIN)
    run(free, 1)
    tight = Pool(int(1.04 * free.peak), GRAIN)
    run(tight, 4)
    assert tight.peak == free.peak and tight.used == 0


def test_bytes_stored_are_known_without_a_tier() -> None:
    assert stored_bytes("host", 1) == stored_bytes("peer", 512) == 512
    assert stored_bytes("nvme", 5000) == 8192 + 4096
    assert stored_bytes("nvme", 2 * PIECE + 1) == 2 * PIECE + 4096 + 3 * 4096

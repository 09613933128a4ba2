"""The search for the cheapest options against looking at all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from k3train.activation_search import Option, Problem, cost, fits, least, search


def make(
    seed: int, sites: int, options: int, *, limits: int = 2, ranks: int = 2, channels: int = 3
) -> Problem:
    draw = random.Random(seed)
    table = []
    for number in range(sites):
        size = draw.uniform(1, 10)
        found = [Option("keep", (size,) * limits, (0.0,) * ranks, (0.0,) * channels)]
        for other in range(1, options):
            share = draw.random()
            uses = tuple(size * share * draw.uniform(0.8, 1) for _ in range(limits))
            seconds = tuple(draw.choice((0.0, draw.random())) for _ in range(ranks))
            moves = tuple(draw.choice((0.0, size * draw.random())) for _ in range(channels))
            found.append(Option(f"{number}.{other}", uses, seconds, moves))
        table.append(tuple(found))
    everything = [sum(options[0].uses[k] for options in table) for k in range(limits)]
    floor = [sum(min(o.uses[k] for o in options) for options in table) for k in range(limits)]
    share = draw.uniform(0.2, 0.9)
    bounds = tuple(low + share * (high - low) for low, high in zip(floor, everything, strict=True))
    free = tuple(draw.uniform(0, 0.3 * sum(everything)) for _ in range(channels))
    return Problem(tuple(table), bounds, tuple(draw.randrange(ranks) for _ in range(channels)), free)


def brute(problem: Problem) -> float | None:
    every = itertools.product(*(range(len(options)) for options in problem.sites))
    return min((cost(problem, choice) for choice in every if fits(problem, choice)), default=None)


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_what_trying_everything_finds(seed: int) -> None:
    problem = make(seed, sites=5, options=4)
    best, found = brute(problem), search(problem)
    if best is None:
        assert found is None
        return
    assert found is not None and fits(problem, found.choice)
    assert found.is_proved
    assert cost(problem, found.choice) == pytest.approx(found.seconds, abs=1e-12)
    assert found.seconds == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_a_search_cut_short_says_how_far_off_it_may_be(seed: int) -> None:
    problem = make(seed, sites=7, options=4)
    whole, short = search(problem), search(problem, most_nodes=0)
    assert whole is not None and short is not None and whole.is_proved
    assert fits(problem, short.choice)
    assert short.bound <= whole.seconds + 1e-9 and whole.seconds <= short.seconds + 1e-9


def test_many_sites_are_solved_within_a_hundredth() -> None:
    problem = make(7, sites=26, options=6, limits=4, ranks=4, channels=8)
    found = search(problem)
    assert found is not None and fits(problem, found.choice)
    assert found.seconds <= found.bound * 1.05 + 1e-9


def test_nothing_fits() -> None:
    problem = make(1, sites=4, options=3)
    tight = Problem(problem.sites, (0.0, 0.0), problem.channel_ranks, problem.free)
    assert search(tight) is None
    smallest = least(tight)
    uses = [sum(o[i].uses[0] for o, i in zip(tight.sites, c, strict=True)) for c in (smallest, (0,) * 4)]
    assert uses[0] <= uses[1]


def test_a_choice_that_costs_as_much_as_is_known_is_not_given_again() -> None:
    problem = make(3, sites=5, options=4)
    found = search(problem)
    assert found is not None and found.seconds > 0
    assert search(problem, below=found.seconds * 0.99) is None
    assert search(problem, below=found.seconds * 1.01) is not None


def test_what_fits_beside_the_computation_is_free() -> None:
    keep = Option("keep", (4.0,), (0.0,), (0.0,))
    host = Option("host", (0.0,), (0.0,), (1.0,))
    again = Option("recompute", (1.0,), (0.3,), (0.0,))
    problem = Problem(((keep, host, again),) * 3, (6.0,), (0,), (2.0,))
    found = search(problem)
    assert found is not None and found.seconds == 0 and sum(map(bool, found.choice)) in (2, 3)
    slow = search(Problem(problem.sites, (6.0,), (0,), (1.0,)))
    assert slow is not None and slow.seconds == pytest.approx(0.3)

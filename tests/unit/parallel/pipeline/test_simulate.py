"""Letters: p pipeline ranks, v chunks of a rank, m micro-batches."""

import pytest

from parallel.pipeline.simulate import EXACT_ROUNDS, Operation, makespan, operations, peak_held

CASES = [(2, 1, 2), (2, 2, 4), (4, 1, 7), (4, 2, 8), (4, 3, 12), (8, 1, 32), (8, 2, 32), (3, 3, 9)]


@pytest.mark.parametrize(("p", "v", "m"), CASES)
def test_idle_time_of_equal_stages_is_the_closed_form(p: int, v: int, m: int) -> None:
    span = makespan([1] * (p * v), [2] * (p * v), p, m)
    assert span - 3 * v * m == 3 * (p - 1)


@pytest.mark.parametrize(("p", "v", "m"), CASES)
def test_peak_of_the_first_rank_is_the_closed_form(p: int, v: int, m: int) -> None:
    [held] = peak_held([(1,)] * (p * v), 0, p, m)
    assert held == (min(p, m) if v == 1 else min(2 * (p - 1) + (v - 1) * p + 1, m * v))


def test_interleaved_order_by_hand() -> None:
    order = operations(1, pipeline=2, virtual=2, microbatches=2)
    letters = [f"{'F' if op.forward else 'B'}{op.stage}.{op.microbatch}" for op in order]
    assert letters == ["F1.0", "F1.1", "F3.0", "B3.0", "F3.1", "B3.1", "B1.0", "B1.1"]


@pytest.mark.parametrize(("p", "v", "m"), CASES)
def test_each_microbatch_passes_each_stage_once_each_way(p: int, v: int, m: int) -> None:
    for rank in range(p):
        expected = {
            Operation(forward, chunk * p + rank, microbatch)
            for forward in (True, False)
            for chunk in range(v)
            for microbatch in range(m)
        }
        order = operations(rank, p, v, m)
        assert len(order) == len(expected) and set(order) == expected


def test_one_rank_has_no_bubble_and_no_messages() -> None:
    assert makespan([3], [5], 1, 7, hop=100) == 7 * 8


def test_a_slow_stage_sets_the_pace() -> None:
    # Two stages, three micro-batches: the second stage works without a pause once it has started.
    assert makespan([1, 10], [2, 20], 2, 3) == 1 + 3 * 30 + 2


def test_messages_take_time_along_the_critical_path() -> None:
    assert makespan([1, 1], [2, 2], 2, 1, hop=0.5) == 6 + 2 * 0.5


def test_long_steps_cost_what_their_last_round_does() -> None:
    forward, backward, p = [1, 2, 1, 3, 1, 1, 2, 5], [2, 4, 2, 6, 2, 2, 4, 10], 4
    spans = [makespan(forward, backward, p, p * (EXACT_ROUNDS + more)) for more in (0, 1, 2)]
    assert spans[2] - spans[1] == spans[1] - spans[0] > 0
    assert spans[0] > makespan(forward, backward, p, p * (EXACT_ROUNDS - 1))


def test_kinds_are_reported_at_the_moment_of_the_largest_sum() -> None:
    # 1F1B on rank 0 of 2 holds two micro-batches of stage 0.
    assert peak_held([(1, 10), (5, 5)], 0, 2, 4) == [2, 20]
    assert peak_held([(1, 10), (5, 5)], 1, 2, 4) == [5, 5]

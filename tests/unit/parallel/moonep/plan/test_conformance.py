"""Every backend against the reference, and the reference against plans made by hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from parallel.moonep.plan import BackendError, backends, plain, plan, reference, vectorised
from tests.unit.parallel.moonep.plan.conformance import CASES, counts_of, expected, plans, same


@pytest.mark.parametrize("name", CASES)
def test_tensors_plan_like_lists(name: str) -> None:
    for actual, wanted in zip(plans(name, "torch", "cpu"), expected(name), strict=True):
        same(actual, wanted)


@pytest.mark.parametrize("name", CASES)
def test_allocations_are_equal_whichever_way(name: str) -> None:
    counts = counts_of(CASES[name].choices(), CASES[name].experts)
    wanted = torch.tensor(reference.fill(counts.tolist()), dtype=torch.int32)
    assert torch.equal(plain.fill(counts), wanted)
    assert torch.equal(vectorised.fill_on_device(counts), wanted)


@pytest.mark.skipif(backends.importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_plan_like_lists_in_the_interpreter() -> None:
    names = ["unequal", "equal quotas", "ties"]
    code = (
        "from parallel.moonep.plan import triton\n"
        "from tests.unit.parallel.moonep.plan import conformance as c\n"
        f"for name in {names}:\n"
        "    case = c.CASES[name]\n"
        "    choices = case.choices()\n"
        "    counts = c.counts_of(choices, case.experts)\n"
        "    wanted = c.expected(name)[2]\n"
        "    alloc = triton.fill(counts)\n"
        "    tables, rows, first = triton.lay_out(alloc, counts, choices[2], 2, case.pad, wanted.stride)\n"
        "    c.same(c.Plan(alloc, *tables, rows, first, wanted.stride, case.pad, 2), wanted)\n"
        "    print(name)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
        check=False,
    )
    assert done.stdout.splitlines() == names, done.stderr


def test_the_fullest_fills_the_emptiest_and_of_equals_the_lowest() -> None:
    assert reference.donations([6, 6, 0, 0], 4) == [(0, 2, 3), (1, 3, 3)]
    # The donor of the first fill ends below its capacity of 4 and is filled in turn.
    assert reference.donations([6, 6, 0, 4], 4) == [(0, 2, 4), (1, 0, 2)]


def test_the_largest_expert_serves_the_largest_quota_and_of_equals_the_lowest() -> None:
    # Capacity 3: ranks 1 and 2 want three rows each of rank 0's three experts of three.
    assert reference.moves([3, 3, 3, 0, 0, 0, 0, 0, 0], 3) == [(0, 1, 3), (1, 2, 3)]
    # Capacity 4 on three ranks. Rank 2 wants more than rank 1, so it gets the larger expert first.
    assert reference.moves([4, 6, 2, 0, 0, 0], 3) == [(1, 2, 4), (0, 1, 2)]


def _as_specified(load: list[int], ranks: int) -> list[tuple[int, int, int]]:
    """Steps B and C word for word: (expert, destination, rows), with searches over whole lists."""
    places, capacity, found = len(load) // ranks, reference.capacities(sum(load), ranks), []
    balance = [sum(load[h * places : (h + 1) * places]) - capacity[h] for h in range(ranks)]
    quota = [[0] * ranks for _ in range(ranks)]
    while max(balance) > 0:
        h, u = balance.index(max(balance)), balance.index(min(balance))
        quota[h][u] = -balance[u]
        balance[h], balance[u] = balance[h] + balance[u], 0
    for h, open_rows in enumerate(quota):
        left = load[h * places : (h + 1) * places]
        while max(open_rows) > 0:
            d, x = open_rows.index(max(open_rows)), left.index(max(left))
            rows = min(open_rows[d], left[x])
            found.append((h * places + x, d, rows))
            open_rows[d] -= rows
            left[x] -= rows
    return found


@pytest.mark.parametrize("most", [1, 2, 6, 40])  # few different loads tie often
def test_heaps_find_what_searches_find(most: int) -> None:
    generator = torch.Generator().manual_seed(most)
    for number in range(500):
        ranks, places = 2 + number % 9, 1 + number % 5
        load = torch.randint(most + 1, (ranks, places), generator=generator)
        load *= torch.randint(1, 4, (ranks, 1), generator=generator)
        flat = load.flatten().tolist()
        assert reference.moves(flat, ranks) == _as_specified(flat, ranks)


def test_capacities_share_the_remainder_from_the_first_rank() -> None:
    assert reference.capacities(11, 4) == [3, 3, 3, 2]
    assert reference.capacities(2, 4) == [1, 1, 0, 0]


def test_a_plan_made_by_hand() -> None:
    # Two ranks of two experts; all eight entries choose experts 0 and 1, rank 1 computes four of expert 1.
    choices = [torch.tensor([[1, 0], [1, 1]]), torch.tensor([[0, 1], [1, 1]])]
    counts = torch.tensor([[1, 3, 0, 0], [1, 3, 0, 0]])
    for backend in ("reference", "torch"):
        first, second = (plan(counts, choices[r], r, pad=2, backend=backend) for r in (0, 1))
        assert first.alloc.tolist() == [[2, 2, 0, 0], [0, 4, 0, 0]]
        assert first.slots.tolist() == [[-1, -1], [1, -1]]
        assert first.ends.tolist() == [[2, 4, 4, 4], [0, 0, 4, 4]]
        assert first.starts.tolist() == [[0, 2, 0, 0], [0, 0, 0, 0]]
        assert first.send.tolist() == [[3, 1], [1, 3]]
        assert first.stride == 8  # four rows, and one of padding for each of four segments
        # Entries of expert 1 are numbered 0 1 2 on rank 0 and 3 4 5 on rank 1; two stay home.
        assert first.rows.tolist() == [2, 0, 3, 8 + 0]
        assert first.first.tolist() == [True, False, True, True]
        assert second.rows.tolist() == [1, 8 + 1, 8 + 2, 8 + 3]
        assert second.first.tolist() == [True, True, True, False]
        assert second.unique.tolist() == [1, 2]
        assert int(first.moved) == 4 and first.replicas.tolist() == [0, 1] and first.load.tolist() == [4, 4]


def test_the_buffer_holds_any_balanced_plan_and_is_known_before() -> None:
    counts = counts_of(CASES["hardest"].choices(), CASES["hardest"].experts)
    choice = CASES["hardest"].choices()[3]
    total = sum(CASES["hardest"].tokens) * CASES["hardest"].top_k
    known = plan(counts, choice, 3, pad=16, total_rows=total)
    assert known.stride == plan(counts, choice, 3, pad=16).stride == 1200  # 780 + 15 * 28, up to sixteens
    assert int(known.ends.max()) <= known.stride


def test_a_backend_that_cannot_plan_says_why() -> None:
    with pytest.raises(
        BackendError, match="planner triton: runs on cuda tensors, not cpu; use auto or torch"
    ):
        backends.resolve("triton", "cpu", 8, 14, 4)
    with pytest.raises(BackendError, match="planner fast: no such backend; use auto, triton, torch"):
        backends.resolve("fast", "cpu", 8, 14, 4)
    assert backends._ENTRIES[0].refuses("cuda", 256, 14, 4) == "takes at most R=128, not 256"
    assert backends.resolve("auto", "cpu", 256, 14, 4) is vectorised
    assert [name for name, *_ in backends.report()] == ["triton", "torch", "reference"]

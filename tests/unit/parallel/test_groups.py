"""Starting and ending the process groups, on real processes."""

from __future__ import annotations

import pytest

from tests.dist.launch import WorkersFailed, run_workers

WORKERS = "tests.unit.parallel.group_workers"


def test_alone_without_torchrun() -> None:
    assert run_workers(f"{WORKERS}:alone", 1) == [{"world": 1, "device": "cpu", "again": True}]


def test_groups_are_those_of_the_topology() -> None:
    answers = run_workers(f"{WORKERS}:memberships", 4, args={"pipeline": 2, "data": 2, "expert": 2})
    for rank, answer in enumerate(answers):
        assert answer["rank"] == rank
        for kind, found, wanted in answer["groups"]:
            assert found == wanted, kind


def test_wrong_number_of_processes_is_refused() -> None:
    with pytest.raises(WorkersFailed, match="the layout needs 2 ranks, 1 were started"):
        run_workers(f"{WORKERS}:memberships", 1, args={"pipeline": 2})


def test_digests_that_differ_name_their_ranks() -> None:
    message = "the configuration of rank 0 and of ranks [2] differ; start every node with the same command"
    assert run_workers(f"{WORKERS}:compare", 3, args={"digests": ["a", "a", "b"]}) == [message] * 3
    assert run_workers(f"{WORKERS}:compare", 2, args={"digests": ["a", "a"]}) == ["same"] * 2


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(WorkersFailed, match="rank 1 exited with 7"):
        run_workers(f"{WORKERS}:die", 2, timeout=60)

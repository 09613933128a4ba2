"""A run that is killed, stopped and left without disk at random times ends as one left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import KINDS, compare, plan


@pytest.mark.timeout(200)
def test_a_stopped_rank_is_found_and_changes_no_loss(tmp_path: Path) -> None:
    figures = compare(tmp_path, steps=8, faults=1, seed=3, kinds=("stop",))
    assert figures["final_loss_equal"], figures
    assert (figures["kills"], figures["resumes"], figures["hangs_found"]) == (1, 1, 1), figures
    assert figures["statuses"] == [0], "the agent starts the ranks again by itself"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_kind_of_fault_changes_no_loss(tmp_path: Path) -> None:
    figures = compare(tmp_path, steps=24, faults=len(KINDS), seed=1)
    assert figures["final_loss_equal"], figures
    assert {fault.split()[0] for fault in figures["faults"]} == set(KINDS)
    assert figures["kills"] == 3 and figures["resumes"] >= 4 and figures["hangs_found"] >= 1, figures
    assert figures["statuses"][-1] == 0 and 75 in figures["statuses"], figures


def test_the_faults_follow_from_the_seed() -> None:
    assert plan(1, 60, 5, ("kill", "stop")) == plan(1, 60, 5, ("kill", "stop"))
    steps = [step for step, _ in plan(2, 60, 10, KINDS)]
    assert steps == sorted(steps) and min(steps) >= 5 and max(steps) <= 58

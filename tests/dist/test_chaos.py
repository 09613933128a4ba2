"""A run that is killed and stopped at random times ends with the losses of the run left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import compare, plan


@pytest.mark.timeout(300)
def test_a_killed_and_a_stopped_rank_change_no_loss(tmp_path: Path) -> None:
    figures = compare(tmp_path, steps=14, faults=2, seed=3, kinds=("kill", "stop"))
    assert figures["final_loss_equal"], figures
    assert figures["kills"] == 2 and figures["resumes"] >= 2, figures
    assert figures["hangs_found"] >= 1, figures


def test_the_faults_follow_from_the_seed() -> None:
    assert plan(1, 60, 5, ("kill", "stop")) == plan(1, 60, 5, ("kill", "stop"))
    steps = [step for step, _ in plan(2, 60, 10, ("kill", "stop", "term", "corrupt", "full"))]
    assert steps == sorted(steps) and min(steps) >= 5 and max(steps) <= 58

"""A run that is killed, stopped, damaged and left without disk at random times ends as one left alone.

The fast tests disturb a program that stands in for the trainer, and so prove the benchmark; the slow one
disturbs the trainer. Single faults of the trainer: `test_hang`, `test_disk`, `test_checkpoint`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.chaos import KINDS, MARK, Clock, Pace, arrivals, compare
from launch import guard

ROOT = Path(__file__).resolve().parents[2]
PACE = Pace(step=30.0, start=30.0)


def stand_in(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-S", str(ROOT / "tests/dist/chaos_program.py"), *arguments]


def test_every_kind_of_fault_is_sent_and_counted_and_changes_nothing(tmp_path: Path) -> None:
    (row,) = compare(tmp_path, steps=60, pace=PACE, mtbf=90, seeds=[2], most=len(KINDS), command=stand_in)
    assert sorted(told.split()[0] for told in row["told"]) == sorted(KINDS)
    assert row["final_loss_equal"] and row["statuses"][-1] == 0, row
    assert (row["kills"], row["stops"], row["corruptions"]) == (3, 1, 1), row
    assert row["statuses"].count(-9) == 1 and set(row["statuses"]) <= {0, 75, -9}, row
    assert row["resumes"] >= 1 and row["minutes_taken"] >= 30, row


def test_a_damaged_checkpoint_that_is_taken_changes_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARELESS", "1")
    (row,) = compare(
        tmp_path, steps=20, pace=PACE, mtbf=60, seeds=[1], kinds=("corrupt",), most=1, command=stand_in
    )
    assert row["corruptions"] == 1 and not row["final_loss_equal"], row


def test_the_clock_counts_steps_and_starts_and_stands_while_nothing_runs() -> None:
    clock = Clock(Pace(step=30.0, start=20.0, wall_step=1.0, wall_start=10.0))
    assert clock.look([], 0, 0.0) == 0.0
    assert clock.look([7], 0, 100.0) == 0.0
    assert clock.look([7, 8], 0, 105.0) == 10.0
    assert clock.look([7, 8], 0, 200.0) == 20.0, "a start takes no longer, however long it takes here"
    assert clock.look([7, 8], 1, 201.0) == 50.0
    assert clock.look([7, 8], 1, 201.5) == 65.0
    assert clock.look([7, 8], 3, 203.0) == 110.0
    assert clock.look([], 3, 203.5) == 125.0 == clock.look([], 3, 300.0), "half a step is lost with the ranks"
    assert clock.look([9], 2, 301.0) == 125.0, "the lines of lost steps go"
    assert clock.look([9], 3, 311.0) == 175.0
    assert (clock.executed, clock.starts, clock.steps) == (4, [101.0, 10.0], [1.0, 1.0])


def test_faults_follow_from_the_seed_at_the_stated_rate() -> None:
    first, second = (list(islice(arrivals(3, 300.0, KINDS), 700)) for _ in range(2))
    assert first == second != list(islice(arrivals(4, 300.0, KINDS), 700))
    times = [at for at, _ in first]
    gaps = [after - before for before, after in zip([0.0, *times[:-1]], times, strict=True)]
    assert 270 < sum(gaps) / len(gaps) < 330
    memoryless = sum(gap > 300 for gap in gaps) / len(gaps)
    assert 0.32 < memoryless < 0.42, "e to the -1 of exponential gaps are longer than their mean"
    assert {kind for _, kind in first[: len(KINDS)]} == set(KINDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_benchmark_that_is_killed(number: int, tmp_path: Path) -> None:
    script = (
        "import signal; from pathlib import Path; from benchmarks import chaos; "
        "from tests.dist import test_chaos; signal.signal(signal.SIGTERM, chaos.leave); "
        f"chaos.compare(Path({str(tmp_path)!r}), steps=10**6, pace=test_chaos.PACE, mtbf=1e9, seeds=[1], "
        "command=test_chaos.stand_in)"
    )
    benchmark = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    folder, deadline = str(tmp_path / "runs"), time.monotonic() + 60
    while len(ranks := [pid for pid in guard.marked(MARK, folder) if _is_rank(pid)]) < 4:
        assert time.monotonic() < deadline and benchmark.poll() is None
        time.sleep(0.05)
    os.kill(ranks[0], signal.SIGSTOP)
    benchmark.send_signal(number)
    assert benchmark.wait(30) == (143 if number == signal.SIGTERM else -number)
    while guard.marked(MARK, folder) or Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_rank(pid: int) -> bool:
    try:
        return b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_fault_changes_a_loss_of_the_trainer(tmp_path: Path) -> None:
    (row,) = compare(tmp_path, steps=24, pace=PACE, mtbf=120, seeds=[1], most=len(KINDS))
    assert row["final_loss_equal"] and row["statuses"][-1] == 0, row
    assert len(row["told"]) >= 4 and row["resumes"] >= 2, row

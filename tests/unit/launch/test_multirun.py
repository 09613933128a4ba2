from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k3train.errors import UserError
from launch import guard
from launch.multirun import plan_jobs

pytestmark = pytest.mark.timeout(90)


def test_every_combination_gets_a_folder_of_its_own() -> None:
    jobs = plan_jobs(["recipe=tiny", "optim=adamw,muon", "run.seed=range(1,3)", "run.dir='a b'"])
    assert [job.swept for job in jobs] == [
        "optim=adamw run.seed=1", "optim=adamw run.seed=2", "optim=muon run.seed=1", "optim=muon run.seed=2",
    ]  # fmt: skip
    assert [job.folder for job in jobs] == [f"a b/{number}" for number in range(4)]
    assert "run.dir='a b/3'" in jobs[3].overrides


def test_runs_that_already_differ_in_folder_keep_it() -> None:
    jobs = plan_jobs(["recipe=tiny", "run.name=x,y"])
    assert [job.folder for job in jobs] == ["runs/x", "runs/y"]


def test_one_bad_value_stops_the_sweep_before_it_starts() -> None:
    with pytest.raises(UserError, match=r"optim\.beta1=2\.0: must be from 0 to 1, 1 excluded"):
        plan_jobs(["recipe=tiny", "optim.beta1=0.9,2"])


def test_a_failed_run_shows_in_the_table_and_in_the_status(run: Callable[..., tuple[int, str, str]]) -> None:
    arguments = ("-m", "recipe=tiny_dense_check", "run.seed=1,2,3", "optim.lr=0.25", "run.dir=s")
    code, out, _ = run("launch.cli", "train", *arguments, fake="log")
    assert code == 1
    table = [line.split() for line in out.splitlines()[-3:]]
    assert table == [
        ["0", "done", "0.2500", "run.seed=1", "s/0"],
        ["1", "failed", "(1)", "0.2500", "run.seed=2", "s/1"],
        ["2", "done", "0.2500", "run.seed=3", "s/2"],
    ]


def test_a_signal_saves_the_current_run_and_starts_no_other(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    arguments = ("-m", "recipe=tiny_dense_check", "run.seed=1,2", "run.dir=s")
    process = start("launch.cli", "train", *arguments, fake="wait")
    deadline = time.monotonic() + 40
    while not (tmp_path / "s/0/ready-0").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert (tmp_path / "s/0/saved-0").exists() and not (tmp_path / "s/1").exists()
    assert "not started" in out.splitlines()[-1]


def test_a_killed_sweep_leaves_nothing_and_its_run_saves(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    arguments = ("-m", "recipe=tiny_dense_check", "run.seed=1,2", "run.dir=s")
    process = start("launch.cli", "train", *arguments, fake="wait")
    deadline = time.monotonic() + 60
    while not (tmp_path / "s/0/ready-0").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    while guard.marked("K3TRAIN_TEST", str(tmp_path)) - {process.pid}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "s/0/saved-0").read_text() == "[15]" and not (tmp_path / "s/1").exists()
    assert not list((tmp_path / "temporary").iterdir())

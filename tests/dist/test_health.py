"""Checks before a run among real ranks: well machines train, and what is wrong is a line with its rank."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from . import runs
from .launch import WorkersFailed, run_workers

WHERE = f"rank 2 on {socket.gethostname()}"


def test_well_ranks_are_told_what_they_have(tmp_path: Path) -> None:
    found = run_workers("tests.dist.health_runs:check", 3, {"folder": str(tmp_path)})
    assert found[0] == found[1] == found[2] and found[0][1] == ""
    figures = found[0][0]
    assert (figures["ranks"], figures["hosts"]) == (3, 1)
    assert 0 < figures["tflops_least"] <= figures["tflops_median"]
    assert figures["all_reduce_gb_per_second"] > 0 and 0 <= figures["clock_skew_seconds"] < 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("slow", rf"{WHERE} computes \S+ TFLOP/s, the median \S+ \(fault.health_slow\)"),
        ("versions", rf"{WHERE} has torch 1.0, rank 0 \S+"),
        ("device", rf"{WHERE} has another, rank 0 \S+"),
        ("clock", rf"the clock of {WHERE} is -\d+\.\d s off; synchronise it"),
        ("sums", rf"an all-reduce of 3 ranks gave wrong sums on {WHERE}"),
    ],
)
def test_what_is_wrong_with_one_is_one_line_on_all(wrong: str, said: str, tmp_path: Path) -> None:
    found = run_workers("tests.dist.health_runs:check", 3, {"folder": str(tmp_path), "wrong": wrong})
    texts = {text for _, text in found}
    assert len(texts) == 1
    assert re.fullmatch(said, texts.pop())


def test_a_rank_that_is_unfit_by_itself_ends_the_start_with_status_4(tmp_path: Path) -> None:
    arguments = runs.overrides(runs.prepare_text(tmp_path), tmp_path / "run", "fault.health=true")
    with pytest.raises(WorkersFailed) as failure:
        run_workers("tests.dist.health_runs:train", 2, {"arguments": arguments, "full_on": 1})
    assert "rank 1 exited with 4" in str(failure.value)
    said = (
        f"k3train: rank 1 on {socket.gethostname()}: cannot write in {tmp_path}/run: No space left on device"
    )
    assert said in str(failure.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_well_machine_trains_as_without_the_check(tmp_path: Path) -> None:
    data = runs.prepare_text(tmp_path)
    for name, health in (("with", "true"), ("without", "false")):
        arguments = runs.overrides(
            data, tmp_path / name, f"fault.health={health}", "fault.health_slow=0.01", "run.steps=2"
        )
        assert run_workers("tests.dist.health_runs:train", 2, {"arguments": arguments}) == [0, 0]
    assert runs.metrics(tmp_path / "with") == runs.metrics(tmp_path / "without")


def doctor(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", "doctor", "--health", *options],
        env=runs.environment() | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=runs.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_doctor_tries_this_machine_out(tmp_path: Path) -> None:
    done = doctor("--json", f"folder={tmp_path}")
    found = json.loads(done.stdout)
    # Ranks that share cores with other tests may be slower than each other; anything else is wrong.
    assert all("fault.health_slow" in problem for problem in found["problems"]), done.stderr
    assert found["healthy"] is (done.returncode == 0) and done.returncode in (0, 4)


def test_doctor_lists_every_rank_that_is_unfit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = doctor(f"folder={tmp_path}/file/run")
    assert (done.returncode, done.stdout) == (4, "")
    folder = f"{tmp_path}/file/run"
    assert done.stderr.splitlines() == [
        f"k3train: rank {rank} on {socket.gethostname()}: cannot write in {folder}: Not a directory"
        for rank in (0, 1)
    ]

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import status

pytestmark = pytest.mark.timeout(90)

Run = Callable[..., tuple[int, str, str]]
Start = Callable[..., "subprocess.Popen[str]"]
TWO_RANKS = ("recipe=tiny_dense_check", "parallel=pp2", "run.dir=out")


def test_two_ranks_meet_and_end_well(run: Run, tmp_path: Path) -> None:
    code, _, err = run("launch.cli", "train", *TWO_RANKS, fake="reduce")
    assert code == 0, err
    assert (tmp_path / "out/rank-1").read_text() == "2 3 1 2 1"


def test_a_refusal_by_one_worker_is_one_line_and_status_2(run: Run) -> None:
    code, _, err = run("launch.cli", "train", *TWO_RANKS, fake="refuse")
    assert (code, err) == (2, "k3train: data.train=[x]: torn\n")


def test_a_killed_rank_is_named_without_a_traceback(run: Run) -> None:
    code, _, err = run("launch.cli", "train", *TWO_RANKS, "fault.max_restarts=0", fake="crash")
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_signal_saves_on_every_rank_and_ends_with_0(start: Start, tmp_path: Path, number: int) -> None:
    process = start("launch.cli", "train", *TWO_RANKS, fake="wait")
    _wait_for(process, tmp_path / "out/ready-0", tmp_path / "out/ready-1")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert [(tmp_path / f"out/saved-{rank}").read_text() for rank in (0, 1)] == [f"[{int(number)}]"] * 2


def test_a_signal_before_the_workers_are_ready_is_kept_for_them(start: Start, tmp_path: Path) -> None:
    process = start("launch.cli", "train", *TWO_RANKS, fake="wait")
    deadline = time.monotonic() + 30
    while not _children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert (tmp_path / "out/saved-1").exists()


def test_one_rank_trains_in_this_process_and_saves_on_a_signal(start: Start, tmp_path: Path) -> None:
    process = start("launch.cli", "train", "recipe=tiny_dense_check", "run.dir=out", fake="wait")
    _wait_for(process, tmp_path / "out/ready-0")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert (tmp_path / "out/saved-0").exists()


def test_workers_end_when_their_agent_is_killed(start: Start, tmp_path: Path) -> None:
    process = start("launch.cli", "train", *TWO_RANKS, fake="wait")
    _wait_for(process, tmp_path / "out/ready-0", tmp_path / "out/ready-1")
    process.kill()
    _wait_for(None, tmp_path / "out/saved-0", tmp_path / "out/saved-1")


@pytest.mark.parametrize("module", ["torch.distributed.run", "launch.torchrun"])
def test_two_nodes_on_one_host(start: Start, tmp_path: Path, module: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two")
    options = ("--nnodes", "2", "--nproc-per-node", "2", *rendezvous, "-m", "launch.train", *TWO_RANKS)
    agents = [start(module, *options, fake="reduce") for _ in range(2)]
    errors = [agent.communicate(timeout=60)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors
    notes = [(tmp_path / f"out/rank-{rank}").read_text() for rank in range(4)]
    assert notes == ["4 10 2 2 2"] * 4


def test_plain_torchrun_shows_a_refused_configuration(run: Run) -> None:
    options = ("--standalone", "--nproc-per-node", "2", "-m", "launch.train")
    code, _, err = run("torch.distributed.run", *options, *TWO_RANKS, "optim.lr=fast", fake="reduce")
    assert code != 0
    assert "k3train: optim.lr=fast: expected a number" in err


def test_status_is_replaced_whole_and_read_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(status.FOLDER_VARIABLE, raising=False)
    assert not status.write(status.WorkerStatus(0, 10))
    monkeypatch.setenv(status.FOLDER_VARIABLE, str(tmp_path))
    for worker in (
        status.WorkerStatus(10, 1),
        status.WorkerStatus(2, 5),
        status.WorkerStatus(10, 1, 2, "no"),
    ):
        assert status.write(worker)
    assert status.read(tmp_path) == [status.WorkerStatus(2, 5), status.WorkerStatus(10, 1, 2, "no")]


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def _wait_for(process: subprocess.Popen[str] | None, *paths: Path) -> None:
    deadline = time.monotonic() + 40
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.02)

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from k3train.log import events
from k3train.train.signals import stop_signals
from launch import guard, status

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_saves_on_every_rank_and_is_75(start: Start, tmp_path: Path, number: int) -> None:
    process = start("launch.cli", "train", *TWO_RANKS, fake="wait")
    _wait_for(process, tmp_path / "out/ready-0", tmp_path / "out/ready-1")
    if number == signal.SIGTERM:  # which one that is stopped hears, too
        os.kill(_children(process.pid, "RANK=1")[0], signal.SIGSTOP)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert [(tmp_path / f"out/saved-{rank}").read_text() for rank in (0, 1)] == [f"[{int(number)}]"] * 2


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.getsignal(signal.SIGHUP)
    assert signal.SIGHUP in stop_signals() or before == signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_the_workers_are_ready_is_kept_for_them(start: Start, tmp_path: Path) -> None:
    process = start("launch.cli", "train", *TWO_RANKS, fake="wait")
    deadline = time.monotonic() + 30
    while not _children(process.pid, "RANK=") and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert (tmp_path / "out/saved-1").exists()


def test_one_rank_trains_in_this_process_and_saves_on_a_signal(start: Start, tmp_path: Path) -> None:
    process = start("launch.cli", "train", "recipe=tiny_dense_check", "run.dir=out", fake="wait")
    _wait_for(process, tmp_path / "out/ready-0")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert (tmp_path / "out/saved-0").exists()


def test_workers_end_when_their_agent_is_killed(start: Start, tmp_path: Path) -> None:
    process = start("launch.cli", "train", *TWO_RANKS, fake="wait")
    _wait_for(process, tmp_path / "out/ready-0", tmp_path / "out/ready-1")
    stopped = _children(process.pid, "RANK=1")
    os.kill(stopped[0], signal.SIGSTOP)
    process.kill()
    _wait_for(None, tmp_path / "out/saved-0", tmp_path / "out/saved-1")
    deadline = time.monotonic() + 20
    while guard.marked("K3TRAIN_TEST", str(tmp_path)):
        assert time.monotonic() < deadline, "something is left of the run"
        time.sleep(0.05)
    assert not list((tmp_path / "temporary").iterdir())


def test_a_rank_that_is_stopped_in_its_imports_is_named_and_started_again(
    start: Start, tmp_path: Path
) -> None:
    process = start("launch.cli", "train", *TWO_RANKS, "fault.meet_seconds=3", fake="watched")
    deadline = time.monotonic() + 40
    while not (found := _children(process.pid, "RANK=1")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    os.kill(found[0], signal.SIGSTOP)
    _wait_for(process, tmp_path / "out/ready-0")
    _wait_for(process, tmp_path / "out/ready-1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    told, again, *_ = err.splitlines()
    assert re.search(r"hang: rank 1 on \S+ has neither computed nor read for 3 s", told), err
    assert "the run hung; starting all ranks again from the start (1 of 3" in again
    assert [event["kind"] for event in events.read(tmp_path / "out")] == ["hang"]


def test_a_node_that_waits_alone_ends_at_once_on_a_stop_signal(start: Start) -> None:
    port = _free_port()
    process = start("launch.torchrun", *_node(port), *TWO_RANKS, fake="reduce")
    _wait_for_port(process, port)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (75, "k3train: SIGTERM while this node waited for the others\n")


@pytest.mark.parametrize(
    ("is_host", "said"),
    [(0, "the nodes meet at 127.0.0.1:{port}, which cannot be reached"), (1, "2 nodes have not met")],
)
def test_a_node_without_the_others_says_so(run: Run, is_host: int, said: str) -> None:
    port = _free_port()
    options = (*_node(port, f"join_timeout=1,read_timeout=1,is_host={is_host}"), *TWO_RANKS)
    code, _, err = run("launch.torchrun", *options, fake="reduce")
    assert code == 1 and "Traceback" not in err
    assert f"k3train: {said.format(port=port)}" in err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_lost_node_is_replaced_and_all_start_again(start: Start, tmp_path: Path) -> None:
    port = _free_port()
    options = (*_node(port), *TWO_RANKS, "run.resume=false")
    stays = start("launch.torchrun", *options, fake="meet")
    _wait_for_port(stays, port)
    lost = start("launch.torchrun", *options, fake="meet")
    _wait_for(stays, *(tmp_path / f"out/ready-{rank}" for rank in range(4)))
    ranks = _children(lost.pid, "RANK=")
    for pid in [lost.pid, *ranks]:
        os.kill(pid, signal.SIGKILL)
    for rank in range(4):
        (tmp_path / f"out/ready-{rank}").unlink()
    replacement = start("launch.torchrun", *options, fake="meet")
    _wait_for(stays, *(tmp_path / f"out/ready-{rank}" for rank in range(4)))
    assert "resume True" in {(tmp_path / f"out/ready-{rank}").read_text() for rank in range(4)}
    for agent in (stays, replacement):
        agent.send_signal(signal.SIGTERM)
    errors = [agent.communicate(timeout=60)[1] for agent in (stays, replacement)]
    assert [stays.returncode, replacement.returncode] == [0, 0], errors
    again = re.compile(r"k3train: rank \d .*; starting all ranks again from the start \(1 of 3")
    assert again.search(errors[0]), errors


@pytest.mark.parametrize("module", ["torch.distributed.run", "launch.torchrun"])
def test_two_nodes_on_one_host(start: Start, tmp_path: Path, module: str) -> None:
    options = (*_node(_free_port()), *TWO_RANKS)
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


def _children(pid: int, variable: str) -> list[int]:
    """Processes that `pid` has started with a variable in their environment that begins so."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and f"\0{variable}".encode() in (stat.parent / "environ").read_bytes():
                found.append(int(stat.parent.name))
    return sorted(found)


def _node(port: int, more: str = "join_timeout=60") -> tuple[str, ...]:
    """torchrun's options of one of two nodes with two ranks."""
    place = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two", "--rdzv-conf", more)
    return ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", *place, "-m", "launch.train")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(process: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + 40
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def _wait_for(process: subprocess.Popen[str] | None, *paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.02)

"""When the watchdog ends a run, and what it sits through; its clock is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3train.fault_config import FaultConfig
from k3train.log import events
from k3train.train import watchdog
from k3train.train.standing import Board, Standing
from k3train.train.watchdog import Watchdog

HANG, LOOK = 30.0, 3.0
CONFIG = FaultConfig(hang_seconds=HANG, hang_steps=20.0, meet_seconds=90.0, start_seconds=600.0)
Make = Callable[..., "Watched"]


class Left(BaseException):
    """What ends the process in a run."""


class Watched:
    """A watchdog whose thread is the test, and its time."""

    def __init__(self, folder: Path, ranks: int = 1, config: FaultConfig = CONFIG) -> None:
        self.dog = Watchdog(config, folder)
        self.dog._board.ranks, self.dog._board.start = ranks, ""
        self.dog._board.open()
        self.now = self.dog._moved
        self.dog.enter("step")

    def warm(self, seconds: float = 1.0) -> None:
        """The first step is done."""
        self.dog.took(seconds)

    def pass_by(self, seconds: float, meanwhile: Callable[[], Any] = lambda: None) -> None:
        """Time passes; the dog looks every `LOOK` seconds, `meanwhile` having happened before each."""
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            meanwhile()
            self.dog._look(self.now)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def leave(self: Watchdog) -> None:
        raise Left

    monkeypatch.setattr(Watchdog, "_leave", leave)
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: None)
    return lambda *given, **named: Watched(tmp_path, *given, **named)


@pytest.fixture
def elsewhere() -> Any:
    """Runs something in another thread of Python's, one that lives on."""
    asked, done, task = threading.Event(), threading.Event(), []

    def work() -> None:
        while asked.wait():
            asked.clear()
            if task[-1] is None:
                return
            task[-1]()
            done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def call(what: Callable[[], Any] | None) -> None:
        task.append(what)
        done.clear()
        asked.set()
        done.wait(10 if what else 0)

    yield call
    call(None)
    thread.join(10)


def test_a_step_in_which_nothing_begins_ends_the_run_and_is_told(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make()
    run.warm()
    with run.dog.phase("forward_backward", 7):
        run.pass_by(HANG)
        with pytest.raises(Left):
            run.pass_by(2 * LOOK)
    (event,) = events.read(tmp_path)
    assert (event["kind"], event["step"]) == ("hang", 7)
    assert "hang: no rank has moved for 3" in event["text"] and "rank 0" in event["text"]
    assert "forward_backward" in event["text"] and event["text"] in capsys.readouterr().err
    assert "test_watchdog" in (tmp_path / "ranks/rank-00000.stacks.txt").read_text()


def test_a_long_save_is_sat_through_while_bytes_move(make: Make, tmp_path: Path, elsewhere: Any) -> None:
    run = make()
    run.warm()
    file = (tmp_path / "shard").open("wb", buffering=0)
    with file, run.dog.phase("checkpoint", 8):
        run.pass_by(20 * HANG, lambda: elsewhere(lambda: file.write(b"x" * 4096)))


def test_a_long_evaluation_is_sat_through_while_operations_begin(make: Make) -> None:
    run = make()
    run.warm()
    with run.dog.phase("eval", 8):
        for number in range(12):
            run.dog.place.at("run", None)
            run.pass_by(HANG - 2 * LOOK)
            assert run.dog.place.beats == number + 1


@pytest.mark.parametrize("phase", ["checkpoint", "eval"])
def test_a_save_or_an_evaluation_that_does_nothing_hangs(phase: str, make: Make) -> None:
    run = make()
    run.warm()
    with run.dog.phase(phase, 8), pytest.raises(Left):
        run.pass_by(HANG + 2 * LOOK)


def test_bytes_outside_of_the_long_phases_are_no_movement(make: Make, tmp_path: Path, elsewhere: Any) -> None:
    run = make()
    run.warm()
    file = (tmp_path / "log").open("wb", buffering=0)
    with file, run.dog.phase("forward_backward", 8), pytest.raises(Left):
        run.pass_by(HANG + 2 * LOOK, lambda: elsewhere(lambda: file.write(b"x" * 4096)))


def test_the_first_step_and_the_end_have_longer(make: Make) -> None:
    run = make()
    run.pass_by(5 * HANG)
    run.warm()
    run.pass_by(HANG)
    run.dog.enter("finish")
    run.pass_by(5 * HANG)
    with pytest.raises(Left):
        run.pass_by(600)


def test_until_all_have_met_it_is_another_limit_and_who_is_missing_is_named(
    make: Make, tmp_path: Path
) -> None:
    run = make(ranks=3)
    run.dog.enter("meet")
    run.pass_by(60)
    other = Board(tmp_path, 1, 3)
    other.open()
    other.post(Standing(1, "node1", 10, 1, 1, 0, "meet"))
    run.pass_by(87)  # it has come meanwhile, so all is counted anew
    with pytest.raises(Left):
        run.pass_by(4 * LOOK)
    told = (tmp_path / "ranks/hang.json").read_text()
    assert "rank 2 looks stuck" not in told and "ranks 1-2 look stuck" in told  # rank 1 is silent since
    assert "rank 2: no entry" in told


def test_what_an_earlier_start_left_is_no_entry_and_no_verdict(tmp_path: Path) -> None:
    before, now = Board(tmp_path, 1, 2, "host 1"), Board(tmp_path, 1, 2, "host 2")
    before.open()
    before.post(Standing(1, "node1", 10, 1, 1, 0, "meet", start="host 1"))
    assert before.condemn("x") and before.condemned() and before.read()
    now.open()
    assert not now.condemned() and now.read() == {}
    assert now.condemn("y")
    Board(tmp_path, 1, 2, "host 2").open()
    assert now.condemned()


def test_the_limit_grows_with_the_steps(make: Make) -> None:
    run = make()
    run.warm(6.0)
    assert run.dog.limit == 120.0
    run.pass_by(119)
    with pytest.raises(Left):
        run.pass_by(2 * LOOK)


def test_a_process_that_was_stopped_as_a_whole_counts_anew(make: Make) -> None:
    run = make()
    run.warm()
    run.pass_by(HANG - LOOK)
    run.now += 10 * HANG
    run.pass_by(HANG - LOOK)
    with pytest.raises(Left):
        run.pass_by(4 * LOOK)


def test_a_rank_waits_as_long_as_another_one_moves(make: Make, tmp_path: Path) -> None:
    run = make(ranks=2)
    run.warm()
    other = Board(tmp_path, 1, 2)
    other.open()
    beats = 0

    def moves() -> None:
        nonlocal beats
        beats += 1
        other.post(Standing(1, "node1", 10, beats, beats, 5, "forward_backward", "B(1,3)", "", HANG))

    run.pass_by(10 * HANG, moves)
    with pytest.raises(Left):
        run.pass_by(HANG + 4 * LOOK)
    assert "rank 1" in (tmp_path / "ranks/hang.json").read_text()

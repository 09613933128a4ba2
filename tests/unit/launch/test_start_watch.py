"""Which ranks the agent takes for hung before they watch themselves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3train.train.standing import Board, Standing
from launch import start_watch
from launch.start_watch import StartWatch, ticks_of

LIMIT, LOOK = 30.0, 3.0


class Started:
    """Three ranks on a watch whose time is the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, limit: float = LIMIT) -> None:
        self.ticks: dict[int, int | None] = {100: 0, 101: 0, 102: 0}
        monkeypatch.setattr(start_watch, "ticks_of", lambda pid: self.ticks[pid])
        self.watch, self.now = StartWatch(folder, limit), 0.0
        self.watch.begin({4: 100, 5: 101, 6: 102}, self.now)

    def pass_by(self, seconds: float, *moving: int) -> list[int]:
        """What the watch says last."""
        found: list[int] = []
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            for pid in moving:
                self.ticks[pid] = (self.ticks[pid] or 0) + 1
            found = self.watch.still(self.now)
        return found


def test_a_rank_that_does_nothing_is_found_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(tmp_path, monkeypatch)
    assert started.pass_by(LIMIT, 100, 102) == []
    assert started.pass_by(LOOK, 100, 102) == [5]
    still = "has neither computed nor read for 30 s, before it met the others"
    assert started.watch.describe([5]) == f"hang: rank 5 on {socket.gethostname()} {still}"


def test_a_rank_that_watches_itself_may_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(tmp_path, monkeypatch)
    for rank, pid, host in ((4, 100, socket.gethostname()), (5, 77, socket.gethostname()), (6, 102, "node9")):
        board = Board(tmp_path, rank, 8)
        board.open()
        board.post(Standing(rank, host, pid, 0, 0, 0, "meet"))
    # Rank 5's entry is of an earlier start, and 6's of another node.
    assert started.pass_by(LIMIT + LOOK) == [5, 6]


def test_what_cannot_be_told_is_not_found_nor_what_was_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(tmp_path, monkeypatch)
    started.ticks[101] = None
    assert started.pass_by(LIMIT - LOOK, 100, 102) == []
    started.now += 10 * LIMIT  # the agent itself was stopped
    assert started.pass_by(LIMIT, 101) == []
    assert started.pass_by(LOOK, 101) == [4, 6]
    off = Started(tmp_path, monkeypatch, limit=0.0)
    assert off.pass_by(10 * LIMIT) == []


def test_ticks_grow_while_a_process_works_and_not_while_it_is_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    before, deadline = ticks_of(process.pid), time.monotonic() + 30
    while ticks_of(process.pid) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)
    while "(stopped)" not in Path(f"/proc/{process.pid}/status").read_text():
        time.sleep(0.01)
    still = ticks_of(process.pid)
    time.sleep(0.1)
    assert still is not None and ticks_of(process.pid) == still
    process.kill()
    process.wait()
    assert ticks_of(process.pid) is None

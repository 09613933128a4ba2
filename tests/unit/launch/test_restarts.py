"""Which failures the agent starts all ranks again after, and how often."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3train.config import Config
from launch import guard, status, train
from launch.restarts import Restarts, first_failure


def result(code: int) -> Any:
    return SimpleNamespace(failures={1: SimpleNamespace(exitcode=code, timestamp=1)})


def restarts(folder: Path, *more: str) -> Restarts:
    options = Namespace(rdzv_backend="c10d", nnodes="1", max_restarts=0)
    overrides = ["recipe=tiny_dense_check", f"run.dir={folder}/run", "fault.max_restarts=2", *more]
    return Restarts(["-m", "launch.train", *overrides], options, str(folder))


def test_restarts_in_a_row_are_counted_and_a_new_checkpoint_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = restarts(tmp_path)
    assert [counted.again(result(-9)) for _ in range(3)] == [True, True, False]
    (tmp_path / "run/checkpoints/step-00000004").mkdir(parents=True)
    assert counted.again(result(124))
    said = capsys.readouterr().err.splitlines()
    assert "rank 1 was killed by SIGKILL" in said[0] and "from the start (1 of 2" in said[0]
    assert "the run hung" in said[-1] and "from step 4 (1 of 2" in said[-1]


@pytest.mark.parametrize("code", [2, 3, 4, 130])
def test_what_would_end_the_same_way_is_not_started_again(code: int, tmp_path: Path) -> None:
    assert not restarts(tmp_path).again(result(code))
    status_file = status.WorkerStatus(0, 1, code)
    (tmp_path / "0.json").write_text(f'{{"rank": 0, "pid": 1, "code": {status_file.code}, "message": ""}}')
    assert not restarts(tmp_path).again(result(-15))


def test_ranks_of_a_second_start_go_on_whoever_caused_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # another node's ranks had failed
    monkeypatch.setenv(status.STARTS_VARIABLE, "")
    given: list[bool] = []

    def stand_in(stages: list[Config], arguments: Sequence[str]) -> int:
        given.append(stages[0].run.resume)
        return 0

    monkeypatch.setattr(train, "_train", stand_in)
    monkeypatch.setattr(train, "defer_until_loop", lambda: None)
    monkeypatch.setattr(guard, "Guard", lambda name, folder: closing(StringIO()))
    counted = restarts(tmp_path, "run.resume=false")
    (tmp_path / "0.json").write_text("{}")
    for _ in range(2):
        counted.meeting()
        assert counted.alone
        counted.starting()
        assert not counted.alone and not list(tmp_path.glob("*.json"))
        train.worker([f"run.dir={tmp_path}/run", "recipe=tiny_dense_check", "run.resume=false"])
    assert given == [False, True]


def test_nothing_is_started_again_behind_a_stop_signal(tmp_path: Path) -> None:
    stopping = restarts(tmp_path)
    stopping.stopping = True
    assert not stopping.again(result(-9))


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ({0: (1, 100), 1: (-9, 100)}, "rank 1 was killed by SIGKILL"),
        ({0: (1, 100), 1: (-9, 101)}, "rank 1 was killed by SIGKILL"),
        ({0: (1, 100), 1: (-9, 106)}, "rank 0 failed with exit status 1"),
        ({0: (1, 100), 1: (-15, 100)}, "rank 0 failed with exit status 1"),
        ({2: (1, 101), 3: (-11, 100)}, "rank 3 was killed by SIGSEGV"),
    ],
)
def test_the_rank_that_was_killed_is_named(failures: dict[int, tuple[int, int]], said: str) -> None:
    found = {rank: SimpleNamespace(exitcode=code, timestamp=at) for rank, (code, at) in failures.items()}
    assert first_failure(found) == said

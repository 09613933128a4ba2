"""A run that goes back behind a loss spike trains as one that never saw the samples of the spike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3train.log import events

from .launch import run_workers
from .runs import metrics, prepare_text
from .spike_runs import STEPS, WATCHED, overrides

Data = list[str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def clean(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose data never held what steps 7 and 8 of the others see."""
    run_dir = tmp_path_factory.mktemp("runs") / "clean"
    assert _run(overrides(data, run_dir), without_steps=[7, 8]) == [0, 0]
    return run_dir


def _run(arguments: list[str], **more: Any) -> list[int]:
    return run_workers("tests.dist.spike_runs:run", 2, {"arguments": arguments, **more})


def _told(run_dir: Path, kind: str) -> list[str]:
    return [event["text"] for event in events.read(run_dir) if event["kind"] == kind]


def test_the_run_goes_back_and_trains_on_as_if_the_samples_had_never_been(
    clean: Path, data: Data, tmp_path: Path
) -> None:
    assert _run(overrides(data, tmp_path, *WATCHED), bad_steps=[7, 8]) == [0, 0]
    assert metrics(tmp_path) == metrics(clean)
    (text,) = _told(tmp_path, "rollback")
    assert "at step 8, above" in text and "since step 7" in text
    assert "back to step 4, and on without the samples of steps 7 to 8 (1 of 5 rollbacks)" in text


# In the middle of the spike; on the way again, ahead of what is left out and behind it.
@pytest.mark.parametrize("stop_at", [7, *(pytest.param(step, marks=pytest.mark.slow) for step in (10, 11))])
def test_a_run_that_was_stopped_decides_as_one_that_was_not(
    stop_at: int, clean: Path, data: Data, tmp_path: Path
) -> None:
    arguments = overrides(data, tmp_path, *WATCHED)
    assert _run(arguments, bad_steps=[7, 8], stop_at=stop_at) == [75, 75]
    assert _run(arguments, bad_steps=[7, 8]) == [0, 0]
    assert metrics(tmp_path) == metrics(clean)
    assert len(_told(tmp_path, "rollback")) == 1


def test_the_run_stops_at_one_spike_too_many(clean: Path, data: Data, tmp_path: Path) -> None:
    arguments = overrides(data, tmp_path, *WATCHED, "fault.spike.rollbacks=1")
    # Behind the rollback steps 9 and 10 see what 11 and 12 would have.
    assert _run(arguments, bad_steps=[7, 8, 11, 12]) == [3, 3]
    assert metrics(tmp_path)[:8] == metrics(clean)[:8]
    (text,) = _told(tmp_path, "diverged")
    assert "at step 10" in text and "gone back 1 times (fault.spike.rollbacks)" in text
    # The same command ends the same way.
    assert _run(arguments, bad_steps=[7, 8, 11, 12]) == [3, 3]
    assert len(_told(tmp_path, "diverged")) == 2


def test_without_a_checkpoint_before_the_spike_the_run_goes_on(data: Data, tmp_path: Path) -> None:
    arguments = overrides(data, tmp_path, *WATCHED, "checkpoint.every=12")
    assert _run(arguments, bad_steps=[7, 8]) == [0, 0]
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, STEPS + 1))
    (text,) = _told(tmp_path, "spike")
    assert "no checkpoint before it, so the run goes on" in text

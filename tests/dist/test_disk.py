"""A run whose disk fills up trains on, does not end as if it were saved, and continues when there is room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import runs
from .launch import run_workers


def _run(arguments: list[str], **more: Any) -> list[int]:
    return run_workers("tests.dist.disk_runs:run", 2, {"arguments": arguments, **more})


def test_a_run_that_cannot_save_its_last_step_has_failed(tmp_path: Path) -> None:
    data = runs.prepare_text(tmp_path)
    arguments = runs.overrides(data, tmp_path / "run", "log=quiet", "eval.every=0")
    # Saved in the step itself: nothing of step 6 is left to write when the disk is full.
    assert _run([*arguments, "checkpoint.asynchronous=false"], full_from=7) == [1, 1]
    assert [line["step"] for line in runs.metrics(tmp_path / "run")] == list(range(1, runs.STEPS + 1))
    saved = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert "step-00000006" in saved and "step-00000008" not in saved
    assert _run(arguments) == [0, 0]
    straight = runs.overrides(data, tmp_path / "straight", "log=quiet", "eval.every=0")
    assert _run(straight) == [0, 0]
    assert runs.metrics(tmp_path / "run") == runs.metrics(tmp_path / "straight")

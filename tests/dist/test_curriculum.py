"""Runs in stages: layouts that change on the way, and a resume at any step as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .curriculum_runs import STEPS, overrides
from .launch import run_workers
from .runs import metrics, prepare_text

DONE, SAVED = [[0, 0], [0, 0]], [[75, 0], [75, 0]]
"""Both ranks ended well, and let go of what each stage had of its own."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run without interruption, with a checkpoint of every step, and its data."""
    folder = tmp_path_factory.mktemp("curriculum")
    data = prepare_text(folder)
    run_dir = folder / "whole"
    assert _run(overrides(data, run_dir)) == DONE
    return run_dir, data


def _run(arguments: list[str], **more: Any) -> list[list[int]]:
    return run_workers("tests.dist.curriculum_runs:run", 2, {"arguments": arguments, **more})


def test_steps_and_the_rate_run_on_through_stages_of_their_own_layout(whole: tuple[Path, list[str]]) -> None:
    run_dir, _ = whole
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["stage"] for line in lines] == ["a"] * 3 + ["b"] * 3 + ["c"] * 2
    # Sequences x micro-batches x data ranks x length of each stage.
    assert [line["tokens"] for line in lines] == [2 * 2 * 2 * 32] * 3 + [2 * 1 * 1 * 64] * 3 + [
        1 * 2 * 128
    ] * 2
    rates = [line["lr"] for line in lines]
    assert rates[0] == max(rates) and rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(2e-4)
    # Each stage evaluates at its end, and the loss goes on where it was.
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6, 8]
    losses = [line["loss"] for line in lines]
    assert losses[0] > 5.4 and max(losses[3:]) < losses[0] and losses[-1] < losses[0] - 0.2
    layouts = [
        json.loads((run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())["layout"]
        for step in (3, 6, 8)
    ]
    sizes = [(found["data"], found["pipeline"], found["context"], found["expert"]) for found in layouts]
    assert sizes == [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 2)]


@pytest.mark.parametrize("step", [3, 5, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 6, 7))])
def test_a_resume_within_a_stage_and_at_its_border_is_bitwise(
    step: int, whole: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run_dir, data = whole
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(copy / "checkpoints" / f"step-{later:08d}")
    assert _run(overrides(data, copy)) == DONE
    assert metrics(copy) == metrics(run_dir)


def test_a_damaged_checkpoint_of_a_border_is_made_good_from_the_stage_before(
    whole: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run_dir, data = whole
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    for later in range(4, STEPS + 1):
        shutil.rmtree(copy / "checkpoints" / f"step-{later:08d}")
    files = (copy / "checkpoints" / "step-00000003").glob("*.distcp")
    shard = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert _run(overrides(data, copy)) == DONE
    assert metrics(copy) == metrics(run_dir)


def test_a_signal_in_a_stage_saves_and_the_same_command_goes_on(
    whole: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run_dir, data = whole
    again = tmp_path / "again"
    # The step at which the first stage ends: stopped there, the next one begins afresh.
    assert _run(overrides(data, again), stop_at=3) == SAVED
    assert metrics(again) == metrics(run_dir)[:3]
    assert _run(overrides(data, again, "curriculum.stop_behind=b")) == DONE
    assert metrics(again) == metrics(run_dir)[:6]
    assert _run(overrides(data, again)) == DONE
    assert metrics(again) == metrics(run_dir)

"""Recipe needle: a model that was pre-trained at 128 tokens reads across 1024, far above chance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from k3train.data.long.score import read
from tests.dist import runs


def evaluate(run: Path, *options: str) -> str:
    """What `k3train eval needle` prints."""
    command = [sys.executable, "-m", "launch.cli", "eval", "needle", str(run), *options]
    done = subprocess.run(
        command,
        env=runs.environment(),
        cwd=runs.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_the_recipe_walks_its_stages_and_is_evaluated_at_their_lengths(tmp_path: Path) -> None:
    run, lengths = tmp_path / "run", (128, 256, 512, 1024)
    stages = [f"curriculum.stages.at_{length}" for length in lengths]
    sizes = [f"{stage}.{key}" for stage in stages for key in ("steps=1", "data.micro_batch_size=1")]
    small = ["data.max_bytes=300000", f"data.cache_dir={tmp_path}/cache", "eval.every=1", "eval.batches=1"]
    code, output = runs.train(["recipe=needle", f"run.dir={run}", *sizes, *small], timeout=300)
    assert code == 0, output
    assert [line["sequence_length"] for line in runs.metrics(run)] == list(lengths)
    assert all(0 <= line["needle_accuracy"] <= 1 for line in runs.metrics(run))
    said = evaluate(run, "samples=2")
    table = read(run)
    assert table is not None and str(table) in said
    assert table.groups == ("128", "256", "512", "1,024") and table.asked.sum() == 4 * 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_codes_are_found_at_eight_times_the_length_of_pre_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = runs.train(["recipe=needle", f"run.dir={run}"], timeout=2400)
    assert code == 0, output
    evaluate(run)
    table = read(run)
    assert table is not None
    chance = table.chance[-1]
    assert chance is not None and chance < 0.08
    assert table.accuracy("128") > 0.9
    assert table.accuracy("1,024") > 0.7
    assert min(share or 0.0 for share in table.by_depth("1,024")) > 0.4
    assert "Codes found in the window" in (run / "report.html").read_text()

"""Whole runs of `k3train train` on a small model and a small text, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.parity.worker import SMALL

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = REPOSITORY / "LICENSE"
STEPS = 8


def prepare_text(folder: Path) -> list[str]:
    """Overrides that train and validate on a text that no machine changes."""
    from k3train.data.prepare import prepare

    text = folder / "text.txt"
    text.write_bytes(TEXT.read_bytes())
    prepare([str(text)], str(folder / "text"), "byte", workers=1, progress=False)
    return ["data=indexed", f"data.train=[{folder}/text]", f"data.valid=[{folder}/text]"]


def overrides(data: list[str], run_dir: Path, *more: str) -> list[str]:
    """A run of STEPS steps, pipeline 2 x virtual 2, with a checkpoint every two steps."""
    return [
        *SMALL,
        "parallel.pipeline=2",
        "parallel.virtual=2",
        f"run.steps={STEPS}",
        "run.microbatches=2",
        "eval.every=4",
        "eval.batches=2",
        "checkpoint.every=2",
        f"run.dir={run_dir}",
        *data,
        *more,
    ]


def environment() -> dict[str, str]:
    """As in a user's shell: this repository first on the path, and nothing of a surrounding torchrun."""
    left_out = ("RANK", "WORLD_SIZE", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start `k3train train` and return at once."""
    return subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "train", *arguments],
        env=environment(),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(arguments: list[str], timeout: float = 100) -> tuple[int, str]:
    """Exit status and output of a whole `k3train train`."""
    process = start(arguments)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=30)
        raise AssertionError(f"still running after {timeout} s:\n{output}") from None
    return process.returncode, output


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock and the machine."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "tokens_per_second", "tflops_per_rank", "mfu", "memory/", "rank_time")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]

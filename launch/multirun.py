"""`k3train train -m`: one run after another over every combination of the swept values."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hydra.core.override_parser.types import Override

from k3train.errors import UserError
from k3train.exit_status import DONE, SAVED
from k3train.train.signals import stop_signals

from .compose import ready
from .guard import Guard
from .overrides import parse

MARK = "K3TRAIN_SWEEP"


@dataclass
class Job:
    """One point of a sweep."""

    overrides: list[str]
    swept: str
    folder: str
    code: int | None = None


def sweep(arguments: Sequence[str]) -> int:
    """Train every combination; 0 when each one ended well, or was saved when a signal came.

    Raises UserError before the first run starts when any of them would be refused.
    """
    jobs = plan_jobs(arguments)
    with tempfile.TemporaryDirectory(prefix="k3train-sweep-") as folder, closing(Guard(MARK, folder)):
        stopped = _run_all(jobs, folder)
    print(summary(jobs))
    done = [job for job in jobs if job.code is not None]
    return 0 if all(job.code in (DONE, SAVED) for job in done) and (stopped or len(done) == len(jobs)) else 1


def plan_jobs(arguments: Sequence[str]) -> list[Job]:
    """The runs of a sweep, each validated, each with a folder of its own."""
    choices = [_values(override) for override in parse(arguments)]
    jobs = []
    for overrides in map(list, itertools.product(*choices)):
        swept = [text for text, values in zip(overrides, choices, strict=True) if len(values) > 1]
        jobs.append(Job(overrides, " ".join(swept), ready(overrides).run.dir))
    if len({job.folder for job in jobs}) < len(jobs):
        for number, job in enumerate(jobs):
            job.folder = str(Path(job.folder) / str(number))
    for job in jobs:
        job.overrides.append(f"run.dir={_quoted(job.folder)}")
        ready(job.overrides)
    return jobs


def summary(jobs: Sequence[Job]) -> str:
    """A line for each run: how it ended, its last loss, what was swept, and where it is."""
    rows = [("", "ended", "loss", "overrides", "folder")]
    for number, job in enumerate(jobs):
        ended = {None: "not started", DONE: "done", SAVED: "saved"}.get(job.code, f"failed ({job.code})")
        rows.append((str(number), ended, _last_loss(job.folder), job.swept, job.folder))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: sweeps take lists and ranges: key=a,b or key=range(1,4)")
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _run_all(jobs: Sequence[Job], folder: str) -> bool:
    """Run the jobs in order, until a stop signal; whether one came. `folder` marks them for the guard."""
    running: list[subprocess.Popen[bytes]] = []
    stopped = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for process in running:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        for number, job in enumerate(jobs):
            if stopped:
                break
            print(f"[{number + 1}/{len(jobs)}] {job.swept}", flush=True)
            command = [sys.executable, "-m", "launch.train", *job.overrides]
            running[:] = [subprocess.Popen(command, env={**os.environ, MARK: folder}, start_new_session=True)]
            job.code = running[0].wait()
    finally:
        for number_, handler in before.items():
            signal.signal(number_, handler)
    return stopped


def _last_loss(folder: str) -> str:
    """The last `loss` in metrics.jsonl; a dash when there is none."""
    try:
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return "-"
    for line in reversed(lines):
        try:
            loss = json.loads(line).get("loss")
        except ValueError:  # a line that a killed run left half written
            continue
        if loss is not None:
            return f"{loss:.4f}"
    return "-"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

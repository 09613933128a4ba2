"""Stands in for `k3train train` in the tests of `benchmarks.chaos`: four processes, and steps of 50 ms.

A state is 64 bytes, its successor their digest, and a loss their beginning; so that a damaged checkpoint, a
step left out or one taken twice change every loss behind it. `careless` takes damaged checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch import guard

MARK = "CHAOS_PROGRAM"
RANKS, STEP_SECONDS, EVERY = 4, 0.05, 2
FAILED, SAVED = 1, 75


def main(arguments: list[str]) -> int:
    given = dict(argument.split("=", 1) for argument in arguments)
    folder, steps = Path(given["run.dir"]), int(given["run.steps"])
    if "RANK" in os.environ:
        return rank(folder, steps) if os.environ["RANK"] == "0" else wait()
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    mark = tempfile.mkdtemp(dir=folder)
    os.environ[MARK] = mark
    with contextlib.closing(guard.Guard(MARK, mark)):
        return agent(folder, arguments)


def agent(folder: Path, arguments: list[str]) -> int:
    ranks: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ranks[0].send_signal(number) if ranks else None)
    while True:
        ranks[:] = [
            subprocess.Popen(
                [sys.executable, "-S", __file__, *arguments], env={**os.environ, "RANK": str(number)}
            )
            for number in range(RANKS)
        ]
        code = watch(ranks, folder)
        for process in ranks:
            process.kill()
            process.wait()
        if code in (0, SAVED):
            return code


def watch(ranks: list[subprocess.Popen[bytes]], folder: Path) -> int:
    stopped = 0
    while True:
        codes = [process.poll() for process in ranks]
        if codes[0] in (0, SAVED):
            return int(codes[0] or 0)
        if any(code is not None for code in codes):
            return FAILED
        states = [Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()[0] for each in ranks]
        stopped = stopped + 1 if "T" in states else 0
        if stopped > 150:  # longer than chaos stalls one
            say(folder, "hang")
            return FAILED
        time.sleep(0.01)


def rank(folder: Path, steps: int) -> int:
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    step, state = newest(folder)
    metrics = folder / "metrics.jsonl"
    if step:
        say(folder, "resumed")
    kept = metrics.read_text().splitlines(keepends=True)[:step] if metrics.exists() else []
    metrics.write_text("".join(kept))
    while step < steps:
        time.sleep(STEP_SECONDS)
        step, state = step + 1, hashlib.sha512(state).digest()
        with metrics.open("a") as file:
            loss = int.from_bytes(state[:4])
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        if step % EVERY == 0 or stop:
            save(folder, step, state)
        if stop:
            return SAVED
    return 0


def wait() -> int:
    signal.pause()
    return FAILED


def save(folder: Path, step: int, state: bytes) -> None:
    target = folder / f"checkpoints/step-{step:08d}"
    with contextlib.suppress(OSError):
        draft = target.with_suffix(".draft")
        draft.mkdir(exist_ok=True)
        (draft / "state.distcp").write_bytes(state)
        (draft / "sum").write_bytes(hashlib.sha256(state).digest())
        draft.rename(target)


def newest(folder: Path) -> tuple[int, bytes]:
    careless = os.environ.get("CARELESS")
    for target in sorted((folder / "checkpoints").glob("step-????????"), reverse=True):
        state = (target / "state.distcp").read_bytes()
        if careless or hashlib.sha256(state).digest() == (target / "sum").read_bytes():
            return int(target.name[5:]), state
    return 0, bytes(64)


def say(folder: Path, kind: str) -> None:
    event: dict[str, Any] = {"kind": kind}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if word.startswith(("run.dir", "run.steps"))]))

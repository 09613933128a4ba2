"""Seconds that a person waits for help, a plan, a refusal, the doctor and the first training step of `tiny`.

Workload: each command in a process of its own, wall time from its start to its end; training to the first
line of metrics.jsonl (two ranks, pipeline 2 x virtual 2, as the recipe says, without GPUs), after which it is
stopped. `cold` starts with an empty cache of derived data, `warm` finds what the cold run left there. Medians
of the repeats, with the fastest and slowest; Python's own byte code may be cold in the first.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report

ROOT = Path(__file__).resolve().parents[1]
COMMANDS: dict[str, tuple[list[str], tuple[int, ...]]] = {
    "--help": (["--help"], (0,)),
    "plan": (["plan", "recipe=tiny"], (0,)),
    "refusal": (["train", "recipe=tiny", "model.top_k=1000"], (2,)),
    "doctor": (["doctor"], (0, 1)),
}
LIMIT = 300.0


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command (%(default)s)")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    seconds: dict[str, list[float]] = {
        name: [run(arguments, good) for _ in range(repeats)] for name, (arguments, good) in COMMANDS.items()
    }
    colds, warms = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            colds.append(first_step(Path(folder), "cold"))
            warms.append(first_step(Path(folder), "warm"))
    seconds |= {"first step, cold": colds, "first step, warm": warms}
    rows = [
        {
            "command": name,
            "seconds": statistics.median(values),
            "fastest": min(values),
            "slowest": max(values),
        }
        for name, values in seconds.items()
    ]
    workload = {"repeats": repeats, "recipe": "tiny"}
    report.publish({"benchmark": "startup", "workload": workload, "rows": rows}, rows, options.json)


def run(arguments: list[str], good: tuple[int, ...]) -> float:
    """Seconds of one command, which must end with one of the statuses `good`."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=LIMIT,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if done.returncode not in good:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return seconds


def first_step(folder: Path, name: str) -> float:
    """Seconds to the first line of metrics of a run of `tiny`, with its cache in `folder`."""
    arguments = ["train", "recipe=tiny", f"run.dir={folder / name}", f"data.cache_dir={folder / 'cache'}"]
    metrics, output = folder / name / "metrics.jsonl", folder / f"{name}.out"
    start = time.perf_counter()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", *arguments],
            cwd=ROOT, env=environment() | {"CUDA_VISIBLE_DEVICES": ""}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None or time.perf_counter() - start > LIMIT:
                raise SystemExit(f"training did not reach its first step:\n{output.read_text()[-4000:]}")
            time.sleep(0.01)
        return time.perf_counter() - start
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run and its ranks, politely first, so that nobody writes into the folder any more."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment() -> dict[str, Any]:
    """The caller's, with the repository on the path for where it is not installed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


if __name__ == "__main__":
    main()

"""All benchmarks, and on a GPU machine the GPU tests, one after another; the last lines are a short table.

Every part runs in a process of its own under a limit, so that one that fails or hangs costs the others
nothing. Output and figures go to FOLDER as NAME.log and NAME.json. --resume leaves out what passed there at
this commit, which also continues where --budget ended a run.

On a CPU the quick forms run. On GPUs those parts run that need no more of them than there are, tests first;
their limits are for an H200 with warm kernel caches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report

ROOT = Path(__file__).resolve().parents[1]
QUICK_LIMIT = 180
"""Seconds for one benchmark's quick form; each is meant to take less than 50 on two idle cores."""
GRACE = 5
"""Seconds between a part's being asked to end and its being killed."""


@dataclass(frozen=True)
class Part:
    """One benchmark, or the GPU tests of one file."""

    name: str
    arguments: tuple[str, ...] = ()
    gpus: int = 1
    """That it needs on a GPU machine; 0 is for CPUs only."""
    limit: int = 120
    """Seconds, on a GPU machine."""


BENCHMARKS = (
    Part("train_step"),
    Part("mfu", limit=500),
    Part("operators"),
    Part("chaos", gpus=0),
    Part("checkpoint", gpus=0),
    Part("startup", gpus=0),
    Part("pipeline_bubble", gpus=2, limit=200),
    Part("vit_overlap", gpus=2, limit=300),
    Part("attn_res_traffic", gpus=0),
    Part("moonep_planner"),
    Part(
        "moe_layer", ("--rounds", "8", "--transport", "collective", "--transport", "peer"), gpus=2, limit=200
    ),
    Part("grouped_gemm"),
    Part("cross_entropy"),
    Part("muon"),
    Part("zero2", ("--quick", "--rounds", "8"), gpus=2),
    Part("offload_tiers"),
    Part("fp8_storage"),
    Part("activation_memory", limit=600),
    Part("mx_codec"),
    Part("qat_overhead"),
    Part("kcp", gpus=2, limit=600),
    Part("attention_fragments"),
    Part("plan_accuracy", limit=300),
    Part("kda", limit=200),
)


@dataclass
class Outcome:
    """How a part ended."""

    part: str
    status: str
    """passed, failed, or "over N s"."""
    seconds: float
    finding: str
    """Goals that it reached, or its tests' last line."""


def main() -> int:
    """0 where every part passed."""
    parser = arguments()
    options = parser.parse_args()
    gpus = count_gpus()
    known = {part.name: part for part in parts(gpus)}
    unknown = [name for name in options.only if name not in known]
    if unknown:
        parser.error(f"--only {unknown[0]}: no such part here; valid are {', '.join(known)}")
    chosen = [part for name, part in known.items() if not options.only or name in options.only]
    if options.list:
        print(report.table([shown(part) for part in chosen]))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(chosen, options, quick=options.quick or not gpus)
    print(report.table([asdict(each) for each in outcomes]))
    return int(any(each.status != "passed" for each in outcomes))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the quick forms on a GPU too")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these parts")
    parser.add_argument("--list", action="store_true", help="name the parts and run none")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), metavar="FOLDER")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed at this commit")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="start nothing that could end later"
    )
    return parser


def count_gpus() -> int:
    """In a process of its own, since CUDA here would hold memory beside the parts."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


def parts(gpus: int) -> list[Part]:
    """That can run on this machine, tests first."""
    if not gpus:
        return list(BENCHMARKS)
    tests = [Part(file.stem, limit=240) for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    return tests + [part for part in BENCHMARKS if 0 < part.gpus <= gpus]


def shown(part: Part) -> dict[str, Any]:
    """A line of --list."""
    return {
        "part": part.name,
        "GPUs": part.gpus,
        "limit s": part.limit,
        "arguments": " ".join(part.arguments),
    }


def command(part: Part, figures: Path, *, quick: bool) -> list[str]:
    """Of a part's process."""
    if part.name.startswith("test_"):
        return [sys.executable, "-m", "pytest", "-q", "--tb=short", f"tests/gpu/{part.name}.py"]
    given = ("--quick",) if quick else part.arguments
    return [sys.executable, f"benchmarks/{part.name}.py", *given, "--json", str(figures)]


def run_all(chosen: list[Part], options: argparse.Namespace, *, quick: bool) -> list[Outcome]:
    """Each part, with a line on standard error as it starts and ends."""
    started, commit, outcomes = time.monotonic(), report.commit(), []
    for number, part in enumerate(chosen, 1):
        state = options.out / f"{part.name}.outcome.json"
        outcome = passed_before(state, commit) if options.resume else None
        limit = QUICK_LIMIT if quick and not part.name.startswith("test_") else part.limit
        left = options.budget - (time.monotonic() - started)
        if outcome is None and limit > left:
            outcome = Outcome(part.name, "not run", 0.0, f"{limit} s do not fit into the budget")
        if outcome is None:
            say(f"[{number}/{len(chosen)}] {part.name}, at most {limit} s")
            outcome = run(part, options.out, limit, quick=quick)
            say(f"    {outcome.status} in {outcome.seconds:.0f} s: {outcome.finding}")
            state.write_text(json.dumps({**asdict(outcome), "commit": commit}))
        outcomes.append(outcome)
    return outcomes


def say(line: str) -> None:
    """Of progress."""
    print(line, file=sys.stderr, flush=True)


def passed_before(state: Path, commit: str) -> Outcome | None:
    """An earlier run's outcome, where it passed at this commit and not at one with changes or none."""
    if not state.exists() or commit == "unknown" or commit.endswith("-dirty"):
        return None
    content = json.loads(state.read_text())
    same = content.pop("commit") == commit and content["status"] == "passed"
    return Outcome(**content) if same else None


def run(part: Part, folder: Path, limit: int, *, quick: bool) -> Outcome:
    """One part under its limit; nothing of it is left behind."""
    figures, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    figures.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(part, figures.absolute(), quick=quick),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    seconds = time.monotonic() - started
    status = f"over {limit} s" if code is None else "failed" if code else "passed"
    return Outcome(part.name, status, seconds, finding(figures, log))


def end(process: subprocess.Popen[bytes]) -> None:
    """The part and every process that it started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def finding(figures: Path, log: Path) -> str:
    """Goals reached, else the last line that the part printed."""
    if figures.exists():
        reached = json.loads(figures.read_text()).get("reached")
        if isinstance(reached, dict):
            missed = [name for name, good in reached.items() if not good]
            return f"{len(reached) - len(missed)} of {len(reached)} goals" + (
                f", missed {', '.join(missed)}" if missed else ""
            )
        return "measured"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:100] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())

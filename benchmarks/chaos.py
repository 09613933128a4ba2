"""Losses of a run that is disturbed at random times, against the same run left alone.

Workload: a very small model (48 wide, 6 layers, 8 experts, sequences of 40) on 4 CPU ranks, PP2 x DP2 with
EP2, on the repository's licence.

Time is simulated, so that 30 minutes of a cluster fit into a few of this machine. A clock moves on by
`--step-seconds` (30) for each step that the run takes, those that it takes again included, and by
`--start-seconds` (30) for each start of the ranks, evenly while it lasts; while no rank runs it stands. The
default 60 steps are 30 minutes of work. Faults are a Poisson process on that clock: gaps between them are
exponential with the mean `--mtbf` (300 seconds), so that they come in steps, saves and starts alike, and
behind each other. Their kinds are dealt from a shuffled deck:

- kill: SIGKILL to a rank
- stop: SIGSTOP to a rank; the watchdog, or in a start the agent, must find it
- stall: SIGSTOP, and a second later SIGCONT: nothing has to happen
- corrupt: a bit of the newest checkpoint flips, then a rank is killed
- term: SIGTERM to the agent, which saves and ends; the same command is given again
- agent: SIGKILL to the agent; its ranks must save and end by themselves, then the same command is given again
- full: no file of a rank may grow beyond 64 KiB until its next start, so that saves fail

`kills` counts SIGKILLs, `stops` ranks stopped for good, `resumes` starts from a checkpoint, `lost_steps`
those that were taken more than once, and `final_loss_equal` compares every step's loss, bit for bit. A
process that is left of a run behind its end is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from launch import guard

ROOT = Path(__file__).resolve().parents[1]
MARK = "K3TRAIN_CHAOS"
"""In the environment of all that is started here."""
KINDS = ("kill", "stop", "stall", "corrupt", "term", "agent", "full")
QUICK = ("stop", "corrupt")
MODEL = (
    "recipe=tiny", "parallel=single", "vision=none", "data.images=[]", "optim=adamw", "model.num_layers=6",
    "model.attn_res_block_size=2", "model.hidden_size=48", "model.num_heads=2", "model.kda_head_dim=16",
    "model.q_lora_rank=24", "model.kv_lora_rank=16", "model.qk_nope_head_dim=16", "model.v_head_dim=16",
    "model.qk_extra_head_dim=8", "model.num_experts=8", "model.top_k=2", "model.latent_size=24",
    "model.expert_ffn_size=32", "model.dense_ffn_size=96", "model.balance_bins=100", "model.mtp_layers=0",
    "data.sequence_length=40", "run.microbatches=2", "parallel.pipeline=2", "parallel.data=2",
    "parallel.expert.size=2", "eval.every=0", "eval.batches=2", "checkpoint.every=2", "checkpoint.keep=4",
    "log.tensorboard=false", "log.trace_steps=0", "fault.hang_seconds=6", "fault.hang_steps=4",
    "fault.meet_seconds=15", "fault.start_seconds=40", "fault.max_restarts=8",
)  # fmt: skip
RANKS = 4
FILE_LIMIT = 64 << 10
STALL_SECONDS = 1.0
LEAVE_SECONDS = 120
"""For ranks without an agent to save and end."""
PATIENCE = 600, 120
"""Seconds for a run, and more for each fault."""
AGAIN = (1, 75, 124, -signal.SIGKILL)
"""Exit statuses after which the same command continues the run."""

Command = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Pace:
    """Seconds of a step and a start: on the simulated clock, and by the wall clock of a run left alone."""

    step: float
    start: float
    wall_step: float = 1.0
    wall_start: float = 10.0


@dataclass
class Clock:
    """Simulated time of a run, as its processes and the lines of its metrics show it."""

    pace: Pace
    done: float = 0.0
    """Seconds of what has ended."""
    executed: int = 0
    starts: list[float] = field(default_factory=list)
    """Wall seconds of each start that came to a step, and in `steps` those of the other steps."""
    steps: list[float] = field(default_factory=list)
    _ranks: set[int] = field(default_factory=set)
    _lines: int = 0
    _phase: str = ""
    _since: float = 0.0

    def look(self, ranks: list[int], lines: int, now: float) -> float:
        """The time; `ranks` are the processes that run now, `lines` the steps in the metrics."""
        if lines > self._lines:
            self._end_step(lines - self._lines, now)
        self._lines = lines
        if not self._ranks & set(ranks):
            self.done += self._part(now)
            self._phase, self._since = ("start" if ranks else ""), now
        self._ranks = set(ranks)
        return self.done + self._part(now)

    def _end_step(self, count: int, now: float) -> None:
        if self._phase == "start":
            self.done += self.pace.start
            self.starts.append(now - self._since)
        else:
            self.steps += [(now - self._since) / count] * count
        self.done += count * self.pace.step
        self.executed += count
        self._phase, self._since = "step", now

    def _part(self, now: float) -> float:
        """Seconds of what goes on."""
        if not self._phase:
            return 0.0
        whole, wall = {
            "start": (self.pace.start, self.pace.wall_start),
            "step": (self.pace.step, self.pace.wall_step),
        }[self._phase]
        return whole * min(1.0, (now - self._since) / wall)


@dataclass
class Told:
    """What became of a run."""

    clock: Clock
    faults: list[str] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    statuses: list[int] = field(default_factory=list)


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, help="60; quick 10")
    parser.add_argument("--step-seconds", type=float, default=30.0, help="simulated (%(default)s)")
    parser.add_argument("--start-seconds", type=float, default=30.0, help="simulated (%(default)s)")
    parser.add_argument("--mtbf", type=float, help="simulated seconds between faults; 300, quick 100")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="a disturbed run for each (%(default)s)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    pace = Pace(options.step_seconds, options.start_seconds)
    steps = options.steps or (10 if options.quick else 60)
    mtbf = options.mtbf or (100.0 if options.quick else 300.0)
    kinds = QUICK if options.quick else KINDS
    most = len(QUICK) if options.quick else None
    with tempfile.TemporaryDirectory(prefix="k3train-chaos-") as folder:
        runs = compare(
            Path(folder), steps=steps, pace=pace, mtbf=mtbf, seeds=options.seeds, kinds=kinds, most=most
        )
    figures = {key: sum(run[key] for run in runs) for key in ("kills", "stops", "resumes", "lost_steps")}
    figures["final_loss_equal"] = all(run["final_loss_equal"] for run in runs)
    about = {"benchmark": "chaos", "mtbf_seconds": mtbf, "simulated_minutes": steps * pace.step / 60}
    shown = [{key: value for key, value in run.items() if not isinstance(value, list)} for run in runs]
    report.publish({**about, **figures, "runs": runs}, shown, options.json)


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "launch.cli", "train", *arguments]


def compare(
    parent: Path,
    *,
    steps: int,
    pace: Pace,
    mtbf: float,
    seeds: Sequence[int],
    kinds: tuple[str, ...] = KINDS,
    most: int | None = None,
    command: Command = command,
) -> list[dict[str, Any]]:
    """Run once undisturbed and once for each seed; the figures of each. `most`: faults of a run, at most."""
    folder = parent / "runs"
    folder.mkdir()
    data = prepare(folder)
    with contextlib.closing(guard.Guard(MARK, folder, grace=0.0)):
        try:
            arguments = [*MODEL, *data, f"run.steps={steps}"]
            calm = run(command, arguments, folder / "calm", iter(()), pace, random.Random())
            assert calm.statuses == [0], tail(folder / "calm")
            timed = Pace(pace.step, pace.start, statistics.median(calm.clock.steps), calm.clock.starts[0])
            rows = []
            for seed in seeds:
                faults = islice(arrivals(seed, mtbf, kinds), most)
                wild = folder / f"seed-{seed}"
                began = time.monotonic()
                told = run(command, arguments, wild, faults, timed, random.Random(seed))
                expected, found = losses(folder / "calm"), losses(wild)
                seconds = time.monotonic() - began
                rows.append({"seed": seed, **figures(told, wild, steps, expected == found, seconds)})
            return rows
        finally:
            guard.end(MARK, str(folder), 0.0)


def figures(told: Told, run_dir: Path, steps: int, equal: bool, seconds: float) -> dict[str, Any]:
    kinds = Counter(event["kind"] for event in lines(run_dir / "events.jsonl"))
    return {
        "steps": steps,
        "faults": len(told.faults),
        "kills": told.sent["KILL"],
        "stops": told.sent["STOP"],
        "corruptions": sum(fault.startswith("corrupt") for fault in told.faults),
        "resumes": kinds["resumed"],
        "hangs_found": kinds["hang"],
        "lost_steps": told.clock.executed - steps,
        "minutes_taken": told.clock.done / 60,
        "final_loss": lines(run_dir / "metrics.jsonl")[-1]["loss"],
        "final_loss_equal": equal,
        "seconds": seconds,
        "told": told.faults,
        "statuses": told.statuses,
    }


def arrivals(seed: int, mtbf: float, kinds: tuple[str, ...]) -> Iterator[tuple[float, str]]:
    """(simulated second, kind) of each fault: a Poisson process, and decks of all kinds."""
    chosen, at = random.Random(seed), 0.0
    while True:
        for kind in chosen.sample(kinds, len(kinds)):
            at += chosen.expovariate(1 / mtbf)
            yield at, kind


def run(
    command: Command,
    arguments: Sequence[str],
    run_dir: Path,
    faults: Iterator[tuple[float, str]],
    pace: Pace,
    chosen: random.Random,
) -> Told:
    """Start the run, do to it what is planned, and start it again until it is done."""
    told, due = Told(Clock(pace)), next(faults, None)
    begun = time.monotonic()
    while True:
        with run_dir.with_suffix(".log").open("ab") as log:
            agent = subprocess.Popen(
                command([*arguments, f"run.dir={run_dir}"]),
                cwd=ROOT,
                env=environment(run_dir.parent),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while agent.poll() is None:
            limit = PATIENCE[0] + PATIENCE[1] * len(told.faults)
            assert time.monotonic() < begun + limit, tail(run_dir)
            ranks = ranks_of(agent.pid)
            now = told.clock.look(ranks, len(lines(run_dir / "metrics.jsonl")), time.monotonic())
            if due is not None and now >= due[0] and strike(due[1], agent.pid, ranks, run_dir, chosen, told):
                told.faults.append(f"{due[1]} at {now:.0f} s")
                due = next(faults, None)
            time.sleep(0.03)
        told.clock.look([], len(lines(run_dir / "metrics.jsonl")), time.monotonic())
        told.statuses.append(agent.returncode)
        wait_until_left(run_dir)
        if agent.returncode == 0:
            return told
        assert agent.returncode in AGAIN, tail(run_dir)


def strike(kind: str, agent: int, ranks: list[int], run_dir: Path, chosen: random.Random, told: Told) -> bool:
    """Do one thing to the run; False when it is not up to it yet."""
    if not ranks:
        return False
    victim = chosen.choice(ranks)
    with contextlib.suppress(ProcessLookupError):
        match kind:
            case "term":
                os.kill(agent, signal.SIGTERM)
            case "full":
                for rank in ranks:
                    _, hard = resource.prlimit(rank, resource.RLIMIT_FSIZE)
                    resource.prlimit(rank, resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
            case "stall":
                os.kill(victim, signal.SIGSTOP)
                time.sleep(STALL_SECONDS)
                os.kill(victim, signal.SIGCONT)
            case "stop":
                os.kill(victim, signal.SIGSTOP)
                told.sent["STOP"] += 1
            case "corrupt" if not corrupt(run_dir / "checkpoints"):
                return False
            case _:
                os.kill(agent if kind == "agent" else victim, signal.SIGKILL)
                told.sent["KILL"] += 1
        return True
    return False


def corrupt(root: Path) -> bool:
    """Flip a bit in the largest file of the newest of several checkpoints."""
    folders = sorted(folder for folder in root.glob("step-*") if "." not in folder.name)
    if len(folders) < 2:
        return False
    try:
        file = max(folders[-1].glob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    except (OSError, ValueError):  # removed meanwhile, to make room
        return False
    return True


def ranks_of(agent: int) -> list[int]:
    """Processes that the agent has started as ranks."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{agent}/task").iterdir():
            for child in (task / "children").read_text().split():
                if b"\0RANK=" in Path(f"/proc/{child}/environ").read_bytes():
                    found.append(int(child))
    return sorted(found)


def wait_until_left(run_dir: Path) -> None:
    """No process of a run may outlive its agent for long."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while left := guard.marked(MARK, str(run_dir.parent)):
        assert time.monotonic() < deadline, f"{len(left)} processes are left: {tail(run_dir)}"
        time.sleep(0.1)


def prepare(folder: Path) -> list[str]:
    """Overrides that train on a text that no machine changes."""
    from k3train.data.prepare import prepare as convert

    text = folder / "text.txt"
    text.write_bytes((ROOT / "LICENSE").read_bytes())
    convert([str(text)], str(folder / "text"), "byte", workers=1, progress=False)
    return ["data=indexed", f"data.train=[{folder}/text]", f"data.valid=[{folder}/text]"]


def environment(folder: Path) -> dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_", "MASTER_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: str(folder)}


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; [] without it."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(run_dir / "metrics.jsonl")]


def tail(run_dir: Path) -> str:
    return run_dir.with_suffix(".log").read_text(errors="replace")[-4000:]


if __name__ == "__main__":
    main()

"""Final loss of a run that is disturbed at random times, against the same run left alone.

Workload: a very small model (48 wide, 6 layers, 8 experts, sequences of 40) on 4 CPU ranks, PP2 x DP2 with
EP2, on the repository's licence. Time is simulated: a step stands for `--step-seconds` (30) of work, so
that the default 60 steps are 30 minutes; a checkpoint every 4 steps is one every 2 minutes. From a seed,
faults come at random steps: kill (SIGKILL to a rank), stop (SIGSTOP to a rank: the watchdog must find it),
term (SIGTERM to the agent: saved, then started again), corrupt (a bit of the newest checkpoint flips, then
a rank is killed) and full (no file of a rank may grow beyond 64 KiB until its next start, so that saves
fail). `kills` counts ranks that were killed or stopped, `resumes` the starts from a checkpoint,
`final_loss_equal` compares every step's loss, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("kill", "stop", "term", "corrupt", "full")
MODEL = (
    "recipe=tiny", "parallel=single", "vision=none", "data.images=[]", "optim=adamw", "model.num_layers=6",
    "model.attn_res_block_size=2", "model.hidden_size=48", "model.num_heads=2", "model.kda_head_dim=16",
    "model.q_lora_rank=24", "model.kv_lora_rank=16", "model.qk_nope_head_dim=16", "model.v_head_dim=16",
    "model.qk_extra_head_dim=8", "model.num_experts=8", "model.top_k=2", "model.latent_size=24",
    "model.expert_ffn_size=32", "model.dense_ffn_size=96", "model.balance_bins=100", "model.mtp_layers=0",
    "data.sequence_length=40", "run.microbatches=2", "parallel.pipeline=2", "parallel.data=2",
    "parallel.expert.size=2", "eval.every=0", "eval.batches=2", "checkpoint.keep=4", "log.tensorboard=false",
    "log.trace_steps=0", "fault.hang_seconds=4", "fault.hang_steps=4", "fault.start_seconds=90",
    "fault.max_restarts=6",
)  # fmt: skip
FILE_LIMIT = 64 << 10
AGAIN = (1, 75, 124)
"""Exit statuses after which the same command continues the run."""


@dataclass
class Disturbed:
    """What was done to a run."""

    faults: list[str] = field(default_factory=list)
    kills: int = 0
    statuses: list[int] = field(default_factory=list)


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, help="60; quick 24")
    parser.add_argument("--step-seconds", type=float, default=30.0, help="simulated (%(default)s)")
    parser.add_argument("--faults", type=int, help="10; quick 5, each kind once")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    steps = options.steps or (24 if options.quick else 60)
    faults = options.faults or (5 if options.quick else 10)
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(Path(folder), steps=steps, faults=faults, seed=options.seed)
    figures["simulated_minutes"] = steps * options.step_seconds / 60
    shown = {key: value for key, value in figures.items() if not isinstance(value, list)}
    report.publish({"benchmark": "chaos", **figures}, [shown], options.json)


def compare(
    folder: Path, *, steps: int, faults: int, seed: int, kinds: tuple[str, ...] = KINDS
) -> dict[str, Any]:
    """Run once undisturbed and once disturbed; the figures."""
    data = prepare(folder)
    arguments = [*MODEL, *data, f"run.steps={steps}", "checkpoint.every=4"]
    calm, wild = folder / "calm", folder / "wild"
    done = subprocess.run(
        command([*arguments, f"run.dir={calm}"]), cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    start = time.monotonic()
    told = disturb(
        [*arguments, f"run.dir={wild}"], wild, plan(seed, steps, faults, kinds), random.Random(seed)
    )
    expected, found = losses(calm), losses(wild)
    return {
        "steps": steps,
        "kills": told.kills,
        "resumes": sum(event["kind"] == "resumed" for event in lines(wild / "events.jsonl")),
        "hangs_found": sum(event["kind"] == "hang" for event in lines(wild / "events.jsonl")),
        "final_loss": found[-1],
        "final_loss_equal": found == expected,
        "seconds": time.monotonic() - start,
        "faults": told.faults,
        "statuses": told.statuses,
    }


def plan(seed: int, steps: int, faults: int, kinds: tuple[str, ...]) -> list[tuple[int, str]]:
    """(step, kind) of each fault: every kind in turn, at random steps behind the first checkpoint."""
    chosen = random.Random(seed)
    times = sorted(chosen.randint(5, steps - 2) for _ in range(faults))
    order = [kinds[index % len(kinds)] for index in range(faults)]
    chosen.shuffle(order)
    return list(zip(times, order, strict=True))


def disturb(
    arguments: list[str], run_dir: Path, faults: list[tuple[int, str]], chosen: random.Random
) -> Disturbed:
    """Start the run, do to it what is planned, and start it again until it is done."""
    told, left = Disturbed(), list(faults)
    deadline = time.monotonic() + 240 + 60 * len(faults)
    while True:
        with (run_dir.parent / "wild.log").open("ab") as log:
            agent = subprocess.Popen(
                command(arguments),
                cwd=ROOT,
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            while agent.poll() is None:
                assert time.monotonic() < deadline, (run_dir.parent / "wild.log").read_text()[-4000:]
                if left and len(lines(run_dir / "metrics.jsonl")) >= left[0][0]:
                    step, kind = left[0]
                    if strike(kind, agent.pid, run_dir, chosen, told):
                        told.faults.append(f"{kind} at step {step}")
                        left.pop(0)
                time.sleep(0.05)
        finally:
            end(agent)
        told.statuses.append(agent.returncode)
        if agent.returncode == 0:
            return told
        assert agent.returncode in AGAIN, (run_dir.parent / "wild.log").read_text()[-4000:]


def strike(kind: str, agent: int, run_dir: Path, chosen: random.Random, told: Disturbed) -> bool:
    """Do one thing to the run; False when it is not up to it yet."""
    ranks = ranks_of(agent)
    if len(ranks) < 4:
        return False
    victim = chosen.choice(ranks)
    with contextlib.suppress(ProcessLookupError):
        if kind == "term":
            os.kill(agent, signal.SIGTERM)
            return True
        if kind == "full":
            for rank in ranks:
                _, hard = resource.prlimit(rank, resource.RLIMIT_FSIZE)
                resource.prlimit(rank, resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
            return True
        if kind == "corrupt" and not corrupt(run_dir / "checkpoints"):
            return False
        os.kill(victim, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        told.kills += 1
        return True
    return False


def corrupt(root: Path) -> bool:
    """Flip a bit in the largest file of the newest of several checkpoints."""
    folders = sorted(folder for folder in root.glob("step-*") if "." not in folder.name)
    if len(folders) < 2:
        return False
    file = max(folders[-1].glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
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


def end(agent: subprocess.Popen[bytes]) -> None:
    """Leave none of the processes of a start behind."""
    left = ranks_of(agent.pid) if agent.poll() is None else []
    for pid in [*left, *([agent.pid] if agent.poll() is None else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def prepare(folder: Path) -> list[str]:
    """Overrides that train on a text that no machine changes."""
    from k3train.data.prepare import prepare as convert

    text = folder / "text.txt"
    text.write_bytes((ROOT / "LICENSE").read_bytes())
    convert([str(text)], str(folder / "text"), "byte", workers=1, progress=False)
    return ["data=indexed", f"data.train=[{folder}/text]", f"data.valid=[{folder}/text]"]


def command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "launch.cli", "train", *arguments]


def environment() -> dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_", "MASTER_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; [] without it."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in lines(run_dir / "metrics.jsonl")]


if __name__ == "__main__":
    main()

"""Memory and step time of `k3train plan` beside those of training steps, by layout.

Workload: on a CPU recipe tiny without images in four layouts on one or two ranks (two cores: more ranks would
share cores, and the plan knows of no sharing); on a GPU h200_small and h200_slice on one. Random tokens, each
row one document, as the plan takes them. Calibration (`k3train bench calibrate`) and training steps take
turns, --rounds of them, since a machine's speed drifts over minutes: the plan reads the median of all
calibrations, and the steps of all rounds count. --calibration FILE takes a file instead, --entry the hardware
entry alone.

  time_error    predicted over measured step, less one; the measured one is the median of the slowest rank
  fastest       the same against the fastest step
  core share    on a CPU: CPU time over the step's, of the rank that works most; less than 1 where it waits
                for other ranks, or for a core that others use
  work_error    what the plan has the busiest rank work, without bubble, messages and collectives, over that
                CPU time, less one: others on the machine change less of it
  memory_error  predicted over measured bytes of the fullest rank, less one. On a GPU the measured is the
                most that torch had allocated, and the plan's is its whole ledger; on a CPU it is what can be
                counted there: parameters, gradient buffers, optimizer states, and the most that autograd held
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.ranks import run_ranks

COUNTED = ("parameters", "gradients", "master_weights", "optimizer_states", "activations", "attn_res_bank")
"""Of the ledger, what is counted on a CPU."""
TINY = ("recipe=tiny", "vision=none", "data.images=[]")
CPU = {
    "single": (*TINY, "parallel=single"),
    "dp2": (*TINY, "parallel=dp2"),
    "pp2_vpp2": (*TINY, "parallel=pp2_vpp2"),
    "ep2": (*TINY, "parallel=ep2"),
}
GPU = {"h200_small": ("recipe=h200_small",), "h200_slice": ("recipe=h200_slice",)}
QUICK, QUICK_LAYOUTS = ("model.num_layers=4", "data.sequence_length=64"), ["single", "dp2"]
MEASURED = ("cluster", "measured")
"""Parts of a calibration's file that are numbers."""
GOALS = {"memory_error": 0.03, "time_error": 0.10}
TIMEOUT = 900


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--layout", action="append", help="only this one, may be repeated")
    parser.add_argument("--steps", type=int, help="measured steps of a round (10, quick 3)")
    parser.add_argument("--rounds", type=int, default=1, help="calibrations and runs by turns (1)")
    parser.add_argument("--calibration", type=Path, help="a file that `k3train bench calibrate` wrote")
    parser.add_argument("--entry", action="store_true", help="the hardware entry, without a calibration")
    parser.add_argument("overrides", nargs="*", help="configuration overrides behind the layouts'")
    options = parser.parse_args()
    import torch

    known = GPU if torch.cuda.is_available() else CPU
    small = options.quick and known is CPU
    names = options.layout or (QUICK_LAYOUTS if small else list(known))
    steps = options.steps or (3 if options.quick else 10)
    rows = []
    for name in names:
        overrides = [*known[name], *(QUICK if small else ()), *options.overrides]
        rounds = Rounds(overrides, options.calibration, calibrate=not (options.entry or options.calibration))
        for number in range(1, options.rounds + 1):
            print(f"{name}: round {number} of {options.rounds}", file=sys.stderr, flush=True)
            rounds.run(steps)
        rows.append(row(name, rounds))
        print(report.table([shown(rows[-1])]), file=sys.stderr, flush=True)
    worst = {key: max(abs(each[key]) for each in rows) for key in GOALS}
    reached = {key: worst[key] <= goal for key, goal in GOALS.items()}
    figures = {"benchmark": "plan_accuracy", "worst": worst, "goals": GOALS, "reached": reached, "rows": rows}
    report.publish(figures, list(map(shown, rows)), options.json)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row fits into a table."""
    return {key: value for key, value in row.items() if not isinstance(value, dict | list)}


class Rounds:
    """Calibrations and training steps of one layout by turns."""

    def __init__(self, overrides: list[str], file: Path | None, *, calibrate: bool) -> None:
        from launch.compose import compose, resolve_layout, world_size

        self.overrides = overrides
        self.file = file
        self.calibrate = calibrate
        composed = compose(overrides)
        self.ranks = world_size(composed)
        self.config = resolve_layout(composed, self.ranks)
        self.calibrations: list[dict[str, Any]] = []
        self.found: list[dict[str, Any]] = []

    def run(self, steps: int) -> None:
        """One calibration, and steps behind it."""
        from launch import bench

        if self.calibrate:
            ranks = self.config.cluster.ranks_per_node or 1
            self.calibrations.append(bench.measure(self.config, self.overrides, ranks=ranks, steps=steps))
        arguments = {"overrides": self.overrides, "steps": steps}
        found = run_ranks("benchmarks.plan_accuracy:measure", self.ranks, arguments, timeout=TIMEOUT)
        self.found.append(found)

    def plan(self) -> dict[str, Any]:
        """From the median of the calibrations."""
        from k3train.plan import plan
        from launch import bench
        from launch.compose import ready

        with tempfile.TemporaryDirectory() as folder:
            file = self.file
            if self.calibrations:
                file = Path(folder) / "calibration.json"
                middle = bench.median([{key: each[key] for key in MEASURED} for each in self.calibrations])
                file.write_text(json.dumps({**self.calibrations[0], **middle}))
            extra = [f"cluster.calibration={file}"] if file else []
            return plan(ready([*self.overrides, *extra], inputs=False), self.ranks)


def row(name: str, rounds: Rounds) -> dict[str, Any]:
    """Prediction and measurement of one layout."""
    planned, ranks = rounds.plan(), rounds.ranks
    found = {**rounds.found[-1], "seconds": [second for each in rounds.found for second in each["seconds"]]}
    found["worked"] = statistics.median(each["worked"] for each in rounds.found)
    kinds = found["kinds"]
    ledgers = [
        {kind: size for kind, size in rank.items() if not kinds or kind in COUNTED}
        for rank in planned["memory_bytes"]
    ]
    predicted = max(sum(each.values()) for each in ledgers)
    seconds, fastest = statistics.median(found["seconds"]), min(found["seconds"])
    return {
        "layout": name,
        "ranks": ranks,
        "predicted ms": planned["step_seconds"] * 1e3,
        "measured ms": seconds * 1e3,
        "time_error": planned["step_seconds"] / seconds - 1,
        **(
            {"core share": found["worked"] / seconds, "work_error": worked(planned) / found["worked"] - 1}
            if found["worked"]
            else {}
        ),
        "fastest": planned["step_seconds"] / fastest - 1,
        "predicted MiB": predicted / 2**20,
        "measured MiB": found["bytes"] / 2**20,
        "memory_error": predicted / found["bytes"] - 1,
        "parts": planned["step_seconds_by_part"],
        "phases": found["phases"],
        "planned kinds": ledgers,
        "measured kinds": kinds,
        "seconds": found["seconds"],
        "overrides": rounds.overrides,
    }


def worked(planned: dict[str, Any]) -> float:
    """Seconds that the busiest rank computes."""
    from k3train.step_time import COMPUTING

    parts = planned["step_seconds_by_part"]
    return sum(parts.get(name, 0.0) for name in (*COMPUTING, "optimizer", "newton_schulz", "step"))


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """Steps of one layout; on every rank."""
    import os

    import torch
    import torch.distributed as dist

    from k3train.layout import layout_of
    from k3train.train.assemble import build_trainer, set_numerics
    from k3train.train.calibrate import batches
    from k3train.train.step import train_step
    from launch.compose import compose, resolve_layout
    from parallel.groups import initialize

    config = resolve_layout(compose(overrides), int(os.environ["WORLD_SIZE"]))
    set_numerics(config)
    groups = initialize(layout_of(config), device=config.run.device, timeout_minutes=10, seed=1)
    trainer = build_trainer(config, groups)
    work = batches(config, groups)
    cuda = groups.device.type == "cuda"
    phases: dict[str, list[float]] = {}

    @contextmanager
    def phase(name: str, step: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize()
        if step > 2:
            phases.setdefault(name, []).append(time.perf_counter() - start)

    seconds, cores = [], []
    for number in range(1, steps + 3):
        dist.barrier()
        start, before = time.perf_counter(), time.process_time()
        train_step(trainer, work, number, phase)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cores.append(0.0 if cuda else time.process_time() - before)
    kinds = {} if cuda else counted(trainer, lambda: train_step(trainer, work, steps + 3))
    nbytes = torch.cuda.max_memory_allocated() if cuda else sum(kinds.values())
    gathered: list[Any] = [None] * dist.get_world_size()
    mine = (
        seconds[2:],
        nbytes,
        kinds,
        {name: statistics.median(each) for name, each in phases.items()},
        statistics.median(cores[2:]),
    )
    dist.all_gather_object(gathered, mine)
    fullest = max(gathered, key=lambda each: each[1])
    slowest = [max(each) for each in zip(*(each[0] for each in gathered), strict=True)]
    return {
        "seconds": slowest,
        "bytes": fullest[1],
        "kinds": fullest[2],
        "phases": gathered[0][3],
        "worked": max(each[4] for each in gathered),
    }


def counted(trainer: Any, step: Any) -> dict[str, int]:
    """Bytes on a CPU: states as they lie, and the most that autograd held in a step."""
    from k3train.optim.build import sub_optimizers

    parameters = {p for module in trainer.modules for p in module.parameters()}
    buffers = [b for m in trainer.modules for b in (*m.buffers, *m.expert_parallel_buffers)]
    states: list[Any] = []
    for optimizer in sub_optimizers(trainer.optimizer):
        inner = getattr(optimizer, "optimizer", optimizer)
        states += [t for state in inner.state.values() for t in state.values() if hasattr(t, "element_size")]
    held = HeldByAutograd(parameters)
    gc.collect()
    with held.watching():
        step()
    return {
        "parameters": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "optimizer_states": sum(t.numel() * t.element_size() for t in states if t.dim() > 0),
        "activations": held.peak,
    }


class HeldByAutograd:
    """Storages that autograd keeps for backward, each once, without parameters."""

    def __init__(self, parameters: Any) -> None:
        self.without = {p.untyped_storage().data_ptr() for p in parameters}
        self.counts: Counter[int] = Counter()
        self.now = self.peak = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is saved in the block."""
        import torch

        with torch.autograd.graph.saved_tensors_hooks(lambda t: _Saved(self, t), lambda saved: saved.tensor):
            yield

    def add(self, address: int, nbytes: int, sign: int) -> None:
        """A storage is saved once more, or once less."""
        self.counts[address] += sign
        if self.counts[address] == (1 if sign > 0 else 0):
            self.now += sign * nbytes
            self.peak = max(self.peak, self.now)


class _Saved:
    def __init__(self, held: HeldByAutograd, tensor: Any) -> None:
        self.held, self.tensor = held, tensor
        storage = tensor.untyped_storage()
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        if self.address not in held.without:
            held.add(self.address, self.nbytes, 1)

    def __del__(self) -> None:
        if self.address not in self.held.without:
            self.held.add(self.address, self.nbytes, -1)


if __name__ == "__main__":
    main()

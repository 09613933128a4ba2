"""A training step with quantisation-aware experts beside the same step without, in one run.

Workload: real text (the running Python's standard library, bytes), no checkpointing, no evaluation. Without,
with rounded weights held through the step, and with weights rounded for each use train side by side from the
same weights on the same batches: each step is taken by all in turn. `ratio` is the median over the steps of
a step's time over that of the same step without. `loss` is the mean of the last tenth of the steps, and
`apart` the largest distance from the loss without, of means over a fiftieth of the steps. With `--only` a
run trains some of them, and `--compare WITHOUT.json OTHER.json` then says how far two runs' losses are apart.
What runs is emulated where the products are BF16 of rounded numbers (`k3train doctor`: mx products).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.device import dismantle, synchronize
from benchmarks.train_step import QUICK, release, tell
from k3train.config import Config
from k3train.quiet import quiet
from launch.compose import compose, resolve_layout, world_size
from parallel.cpu import enable_cpu

WITHOUT = "without"
SYSTEMS = {
    WITHOUT: ("quant=none",),
    "held": ("quant=mxfp4_qat",),
    "not held": ("quant=mxfp4_qat", "quant.hold_weights=false"),
}


def measure(configs: dict[str, Config], steps: int, warmup: int) -> list[dict[str, Any]]:
    """Step times, losses and peak memory of each system."""
    from k3train.layout import layout_of
    from k3train.train.assemble import set_numerics
    from k3train.train.inputs import Inputs
    from parallel.groups import destroy, initialize

    first = next(iter(configs.values()))
    set_numerics(first)
    groups = initialize(layout_of(first), device=first.run.device, timeout_minutes=5, seed=1)
    inputs = Inputs(first, groups)
    systems = [System(name, config, groups) for name, config in configs.items()]
    with contextlib.suppress(KeyboardInterrupt):  # what has been measured is told all the same
        for number in range(1, warmup + steps + 1):
            batches = inputs.next_step()
            for system in systems:
                system.step(batches, number)
            if number in (1, warmup) or number % 50 == 0:
                tell({"rank": groups.rank, "step": number, **{s.name: s.losses[-1] for s in systems}})
    rows = [{**system.found(warmup), "rank": groups.rank} for system in systems]
    for system in systems:
        dismantle(system.trainer.modules)
    del systems, system
    inputs.close()
    destroy()
    release()
    return rows


class System:
    """A trainer of its own beside others."""

    def __init__(self, name: str, config: Config, groups: Any) -> None:
        from k3train.train.assemble import build_trainer

        self.name = name
        before = allocated()
        self.trainer = build_trainer(config, groups)
        self.lasting, self.passing = allocated() - before, 0
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, batches: list[dict[str, Any]], number: int) -> None:
        """One step, device work included."""
        from k3train.train.step import train_step

        before = allocated(fresh=True)
        synchronize()
        start = time.perf_counter()
        result = train_step(self.trainer, batches, number)
        synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(result.losses.loss)
        # Optimizer states are made in the first step.
        self.lasting += allocated() - before
        self.passing = max(self.passing, peak() - allocated())

    def found(self, warmup: int) -> dict[str, Any]:
        """Figures behind the warm-up."""
        kept = self.seconds[warmup:]
        figures = {
            "system": self.name,
            "ms": 1e3 * statistics.median(kept),
            "fastest": 1e3 * min(kept),
            "slowest": 1e3 * max(kept),
            "seconds": kept,
            "losses": self.losses,
        }
        return figures | ({"peak GB": (self.lasting + self.passing) / 1e9} if self.lasting else {})


def allocated(*, fresh: bool = False) -> int:
    """Bytes in the GPU allocator's books, 0 without a GPU; `fresh` forgets the peak."""
    import torch

    if not torch.cuda.is_available():
        return 0
    if fresh:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    """The most bytes since the last `fresh`."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def means(losses: list[float], size: int) -> list[float]:
    """Means of `size` neighbours."""
    return [statistics.mean(losses[at : at + size]) for at in range(0, len(losses) - size + 1, size)]


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its ratio and its losses beside those without, where a row is without."""
    plain = next((row for row in rows if row["system"] == WITHOUT), None)
    for kind in ("losses", "seconds"):
        common = min(len(row.get(kind, ())) for row in rows)
        for row in rows:
            row |= {kind: row[kind][:common]} if kind in row else {}
    for row in rows:
        row["loss"] = statistics.mean(row["losses"][-max(1, len(row["losses"]) // 10) :])
        if plain is None:
            continue
        if "seconds" in row:
            pairs = zip(row["seconds"], plain["seconds"], strict=True)
            row["ratio"] = statistics.median(own / other for own, other in pairs)
        size = max(1, len(plain["losses"]) // 50)
        pairs = zip(means(row["losses"], size), means(plain["losses"], size), strict=True)
        row["apart"] = max(abs(own - other) for own, other in pairs)


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--recipe", default="h200_small")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--only", action="append", choices=SYSTEMS, help="may be repeated")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="FILE", help="two runs' --json; trains nothing"
    )
    parser.add_argument("overrides", nargs="*", help="configuration overrides for all systems")
    options = parser.parse_args()
    quiet()
    enable_cpu()
    if options.compare:
        rows = [json.loads(file.read_text())["rows"][0] for file in options.compare]
        for row in rows:
            del row["seconds"]  # of different runs
        publish(rows, {"compared": [file.name for file in options.compare]}, options.json)
        return
    chosen = QUICK if options.quick else (f"recipe={options.recipe}",)
    steps, warmup = (2, 1) if options.quick else (options.steps, options.warmup)
    configs = {}
    for name in options.only or SYSTEMS:
        # The schedule of the learning rate is that of these steps.
        composed = compose([*chosen, f"run.steps={steps + warmup}", *SYSTEMS[name], *options.overrides])
        configs[name] = resolve_layout(composed, world_size(composed))
    rows = measure(configs, steps, warmup)
    if rows[0]["rank"] == 0:
        publish(rows, {"recipe": chosen[0], "overrides": options.overrides, "steps": steps}, options.json)


def publish(rows: list[dict[str, Any]], workload: dict[str, Any], file: Path | None) -> None:
    """The table and the JSON line; losses and times of all steps are in the file alone."""
    compare(rows)
    lists = ("losses", "seconds", "rank")
    shown = [{key: value for key, value in row.items() if key not in lists} for row in rows]
    report.publish({"benchmark": "qat_overhead", **workload, "rows": rows}, shown, file)


if __name__ == "__main__":
    main()

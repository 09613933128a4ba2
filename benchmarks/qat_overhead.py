"""A training step with quantisation-aware experts beside the same step without, in one run.

Workload: real text (the running Python's standard library, bytes), no checkpointing, no evaluation.
Without, with rounded weights held through the step, with weights rounded for each use, and without once
more: `ratio` is the median step time over the mean of the medians without. Losses start from the same
weights and data; `loss` is the mean of the last tenth of the steps, and `apart` the largest distance from
the loss without, of means over a fiftieth of the steps. What runs is emulated: products are BF16 of rounded
numbers, on any hardware.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.train_step import QUICK, dismantle, release, tell, timed
from k3train.config import Config
from k3train.quiet import quiet
from launch.compose import compose, resolve_layout, world_size
from parallel.cpu import enable_cpu

SYSTEMS = {
    "without": ("quant=none",),
    "qat, held": ("quant=mxfp4_qat",),
    "qat, not held": ("quant=mxfp4_qat", "quant.hold_weights=false"),
    "without, again": ("quant=none",),
}


def measure(name: str, config: Config, steps: int, warmup: int) -> dict[str, Any]:
    """Step times, losses and peak memory of one system."""
    import torch

    from k3train.train.assemble import build_trainer, set_numerics, topology
    from k3train.train.inputs import Inputs
    from k3train.train.step import train_step
    from parallel.groups import destroy, initialize

    set_numerics(config)
    groups = initialize(topology(config), device=config.run.device, timeout_minutes=5, seed=1)
    inputs = Inputs(config, groups)
    trainer = build_trainer(config, groups)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []
    seconds = timed(
        lambda step: losses.append(train_step(trainer, inputs.next_step(), step).losses.loss), steps, warmup
    )
    found = {
        "system": name,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "losses": losses,
        "rank": groups.rank,
    }
    if torch.cuda.is_available():
        found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    tell({key: value for key, value in found.items() if key != "losses"})
    dismantle(trainer.modules)
    trainer = None
    inputs.close()
    destroy()
    release()
    return found


def means(losses: list[float], size: int) -> list[float]:
    """Means of `size` neighbours."""
    return [statistics.mean(losses[at : at + size]) for at in range(0, len(losses) - size + 1, size)]


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its ratio and its losses beside those without."""
    plain = [row for row in rows if row["system"].startswith("without")]
    usual = statistics.mean(row["seconds"] for row in plain)
    size = max(1, len(plain[0]["losses"]) // 50)
    base = means(plain[0]["losses"], size)
    for row in rows:
        row["ratio"] = row["seconds"] / usual
        row["loss"] = statistics.mean(row["losses"][-max(1, len(row["losses"]) // 10) :])
        pairs = zip(means(row["losses"], size), base, strict=True)
        row["apart"] = max(abs(own - other) for own, other in pairs)


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--recipe", default="h200_small")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="configuration overrides for all systems")
    options = parser.parse_args()
    quiet()
    enable_cpu()
    chosen = QUICK if options.quick else (f"recipe={options.recipe}",)
    steps, warmup = (2, 1) if options.quick else (options.steps, options.warmup)
    rows = []
    for name, keys in SYSTEMS.items():
        # The schedule of the learning rate is that of these steps.
        composed = compose([*chosen, f"run.steps={steps + warmup}", *keys, *options.overrides])
        rows.append(measure(name, resolve_layout(composed, world_size(composed)), steps, warmup))
    if rows[0]["rank"] == 0:
        compare(rows)
        shown = [{key: value for key, value in row.items() if key not in ("losses", "rank")} for row in rows]
        figures = {"benchmark": "qat_overhead", "recipe": chosen[0], "overrides": options.overrides}
        report.publish({**figures, "steps": steps, "rows": rows}, shown, options.json)


if __name__ == "__main__":
    main()

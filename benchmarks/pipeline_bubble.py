"""Idle time of the pipeline's ranks: measured, beside the plan with costs of the same run, and the formula.

Workload: the recipe's model (tiny, on two CPU ranks of one core; on two GPUs 8 layers of h200_small with a
vocabulary of 8,192 and micro-batches of 8 sequences of 8,192 tokens, so that operations take longer on the
GPU than on the host) on random tokens, PP2 with 1 and 2 chunks on each rank. A step is forward and backward
of all micro-batches. The plan simulates the same table with the medians of what each stage's operations took,
and messages as free; `points` is the largest difference in idle share of any rank, in percentage points.
`formula` is (p-1)/(v m), the idle time over the work if all chunks were equal, `planned bubble` the plan's.
Steps through megatron-core's own schedule, which sends the whole AttnRes bank on every edge, alternate with
those of the table; `ratio` is the table's median time over megatron-core's. `core share` is CPU time over the
time of the operations: well below 1, the machine was not free. Idle shares come from the undisturbed `steps`
(a share of 0.9 or more) unless those are fewer than three, the ratio from all.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.ranks import run_ranks, undisturbed

PIPELINE = 2
QUICK = ("data.sequence_length=128",)
GPU = (
    "recipe=h200_small", "model.num_layers=8", "model.mtp_layers=0", "model.vocab_size=8192",
    "data.sequence_length=8192", "data.micro_batch_size=8", "run.deterministic=false",
)  # fmt: skip
TIMEOUT = 600


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--virtual", type=int, action="append", help="chunks of a rank (1 and 2); repeatable")
    parser.add_argument("--microbatches", type=int, default=8, help="a multiple of 2 (%(default)s)")
    parser.add_argument("--steps", type=int, help="measured steps of each schedule (20, quick 3)")
    parser.add_argument("overrides", nargs="*", help="configuration overrides behind the recipe's")
    options = parser.parse_args()
    if options.microbatches % PIPELINE:
        parser.error(f"--microbatches {options.microbatches}: megatron-core takes multiples of {PIPELINE}")
    rows = []
    for virtual in options.virtual or [1, 2]:
        overrides = workload(virtual, options.microbatches, quick=options.quick) + options.overrides
        steps = options.steps or (3 if options.quick else 20)
        arguments = {"overrides": overrides, "steps": steps}
        rows.append(run_ranks("benchmarks.pipeline_bubble:measure", PIPELINE, arguments, timeout=TIMEOUT))
    shown = [{key: value for key, value in row.items() if not isinstance(value, list | dict)} for row in rows]
    top = {
        "planned_idle": rows[-1]["planned idle"],
        "measured_idle": rows[-1]["measured idle"],
        "points": rows[-1]["points"],
        "formula": rows[-1]["formula"],
        "step_ratio_vs_megatron": rows[-1]["ratio"],
    }
    report.publish({"benchmark": "pipeline_bubble", **top, "rows": rows}, shown, options.json)


def workload(virtual: int, microbatches: int, *, quick: bool) -> list[str]:
    """Overrides of the recipe for this machine."""
    import torch

    recipe = GPU if torch.cuda.is_available() else ("recipe=tiny", *(QUICK if quick else ()))
    layout = (f"parallel.pipeline={PIPELINE}", f"parallel.virtual={virtual}")
    return [*recipe, "vision=none", *layout, f"run.microbatches={microbatches}"]


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """One layout's row; on every rank."""
    from benchmarks.common.pipelines import PipelineRank
    from k3train.log.timeline import Recording, compare
    from k3train.schedule import pipeline_table
    from parallel.pipeline.build import with_reductions

    rank = PipelineRank(overrides)
    table = with_reductions(pipeline_table(rank.config, rank.groups.topology))
    ours, core, batches = rank.executor(table), rank.megatron_core(), rank.batches()
    measured, reference = [], []
    for number in range(steps + 1):
        first, second = rank.step(ours, batches), rank.step(core, batches)
        assert first.equals(second), "the two schedules do not compute the same"
        if number:
            measured.append(first)
            reference.append(second.seconds)
    rank.close()
    shares = [step.core_share for step in measured]
    recording = Recording(table.layout, table.name, {n: measured[n].ranks for n in undisturbed(shares)})
    row = figures(compare(recording), [step.seconds for step in measured], reference)
    row |= {"core share": statistics.median(shares), "steps": f"{len(recording.steps)} of {steps}"}
    return {**row, "overrides": overrides, "core shares": shares}


def figures(compared: Any, seconds: list[float], reference: list[float]) -> dict[str, Any]:
    """Idle shares of a `k3train.log.timeline.Comparison`, and both schedules' times.

    Shares are of the step's time, from the first operation of any rank to the last; "bubble" is over work.
    """
    layout = compared.planned.table.layout
    planned, measured = (statistics.mean(each) for each in (compared.planned_idle, compared.measured_idle))
    return {
        "v": layout.virtual,
        "m": layout.microbatches,
        "formula": (layout.pipeline - 1) / (layout.virtual * layout.microbatches),
        "planned bubble": compared.planned.bubble_over_compute,
        "planned idle": planned,
        "measured idle": measured,
        "points": compared.points,
        "ms/step": statistics.median(seconds) * 1e3,
        "fastest": min(seconds) * 1e3,
        "slowest": max(seconds) * 1e3,
        "core ms": statistics.median(reference) * 1e3,
        "core fastest": min(reference) * 1e3,
        "core slowest": max(reference) * 1e3,
        "ratio": statistics.median(seconds) / statistics.median(reference),
        "planned idle of ranks": compared.planned_idle,
        "measured idle of ranks": compared.measured_idle,
        "seconds": seconds,
        "core seconds": reference,
    }


if __name__ == "__main__":
    main()

"""The vision tower in the pipeline's bubbles, beside (a) the tower in line on the first stage and (b) a phase
of its own before and after the pipeline, balanced over all ranks.

Workload: the recipe's model (tiny without MTP on two CPU ranks of one core, h200_small with fewer layers on
two GPUs) with a vision tower, PP2, random tokens and images of one size, a sweep of images in a micro-batch.
A step is forward and backward of all micro-batches. A few steps measure what each operation costs; the bubbles
are filled with these costs. Then rounds of one step of each kind: without images (of the same tokens),
bubbles, inline, phase.

`hidden` is 1 - (T - T0) / (W / p): T the step in bubbles, T0 the one without images, both the medians, W what
all the tower's operations took together. 0 is as long as with the tower's work balanced over the ranks, 1 for
nothing. `fastest` is the same from the fastest steps. `planned` simulates the executed table with the medians
of the same run, messages taken as free. `tower share` is W over the language model's work; the plan fits
where at least 80 % are planned as hidden. `core share` is CPU time over the time of the operations: well
below 1, the machine was not free. Figures come from the undisturbed `rounds`, with a share of 0.9 or more in every
step, unless those are fewer than three.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.ranks import run_ranks, undisturbed
from k3train.vision_shapes import Grid, image_cost
from parallel.pipeline.simulate import Costs
from parallel.pipeline.table import VISION_BACKWARD, VISION_FORWARD, Table
from parallel.pipeline.vision_fill import fill, hidden_fraction, inline, phase, plan_parts

PIPELINE = 2
FITS = 0.8
MODES = ("none", "bubbles", "inline", "phase")
CALIBRATION = 3
"""Steps whose medians the bubbles are filled with, after one that is not measured."""
CPU = (
    "recipe=tiny", "model.mtp_layers=0", "data.sequence_length=128",
    "vision=tiny", "vision.hidden_size=128", "vision.num_heads=4", "vision.ffn_size=512",
)  # fmt: skip
GPU = (
    "recipe=h200_small", "model.num_layers=8", "model.mtp_layers=0", "data.sequence_length=4096",
    "run.deterministic=false", "vision=moonvit_v2", "vision.depth=8", "vision.recompute=false",
)  # fmt: skip
SIDES = {"cpu": 8, "cuda": 32}
"""Patches along each side of an image."""
IMAGES = (2, 4, 6, 8)
QUICK_IMAGES = (2, 8)
TIMEOUT = 1800

Bundles = list[list[list[int]]]


@dataclass
class Lane:
    """One kind of step: its executor, its micro-batches, and which image is in which part."""

    table: Table
    executor: Any
    batches: list[dict[str, Any]]
    bundles: Bundles


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument(
        "--images", type=int, action="append", help="in a micro-batch; repeatable (2, 4, 6, 8)"
    )
    parser.add_argument("--virtual", type=int, default=2, help="chunks of a rank (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (%(default)s)")
    parser.add_argument("--rounds", type=int, help="steps of each kind and sweep point (15, quick 2)")
    parser.add_argument("overrides", nargs="*", help="configuration overrides behind the recipe's")
    options = parser.parse_args()
    arguments = {
        "images": sorted(options.images or (QUICK_IMAGES if options.quick else IMAGES)),
        "rounds": options.rounds or (2 if options.quick else 15),
        "overrides": [
            f"parallel.pipeline={PIPELINE}",
            f"parallel.virtual={options.virtual}",
            f"run.microbatches={options.microbatches}",
            *options.overrides,
        ],
    }
    rows = run_ranks("benchmarks.vit_overlap:measure", PIPELINE, arguments, timeout=TIMEOUT)
    shown = [{key: value for key, value in row.items() if not isinstance(value, dict | list)} for row in rows]
    report.publish({"benchmark": "vit_overlap", **summary(rows), "rows": rows}, shown, options.json)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest point where the plan fits, else the smallest one; and the first one where it does not."""
    fitting = [row for row in rows if row["fits"]]
    chosen = fitting[-1] if fitting else rows[0]
    return {
        "images": chosen["images"],
        "fits": chosen["fits"],
        "hidden_fraction": chosen["hidden"],
        "planned_hidden_fraction": chosen["planned"],
        "speedup_vs_inline": chosen["vs inline"],
        "speedup_vs_separate_phase": chosen["vs phase"],
        "no_longer_fits_at": next((row["images"] for row in rows if not row["fits"]), None),
    }


def measure(images: list[int], rounds: int, overrides: list[str]) -> list[dict[str, Any]]:
    """A row for each sweep point; on every rank."""
    import torch

    from benchmarks.common.pipelines import PipelineRank

    cuda = torch.cuda.is_available()
    rank = PipelineRank([*(GPU if cuda else CPU), *overrides])
    side = SIDES["cuda" if cuda else "cpu"]
    rows = [sweep_point(rank, [(1, side, side)] * count, rounds) for count in images]
    rank.close()
    return rows


def sweep_point(rank: Any, grids: list[Grid], rounds: int) -> dict[str, Any]:
    """Calibrate, fill, and run all kinds of step in turn."""
    from k3train.schedule import pipeline_table, stage_costs

    config = rank.config
    every = [grids] * config.run.microbatches
    batches = rank.batches(every)
    plain = [{key: value for key, value in batch.items() if key != "grids"} for batch in batches]
    work = [[image_cost(config.vision, config.model.hidden_size, grid) for grid in row] for row in every]
    bundles = plan_parts(work, PIPELINE)
    table = pipeline_table(config, rank.groups.topology)
    guess = with_vision(stage_costs(config, rank.groups.topology, rank.cuts), work, bundles)
    lanes = {
        "none": lane(rank, table, plain, []),
        "phase": lane(rank, phase(table, guess), batches, bundles),
    }
    steps = {mode: [run(rank, lanes[mode]) for _ in range(CALIBRATION + 1)][1:] for mode in lanes}
    costs = join(lanes, steps, "phase")
    lanes["phase"] = lane(rank, phase(table, costs), batches, bundles)
    lanes["bubbles"] = lane(rank, fill(table, costs), batches, bundles)
    lanes["inline"] = lane(
        rank, inline(table, [1] * len(every)), batches, [[list(range(len(grids)))]] * len(every)
    )
    measured = [{mode: run(rank, lanes[mode]) for mode in MODES} for _ in range(rounds + 1)][1:]
    shares = [min(step.core_share for step in steps.values()) for steps in measured]
    used = [measured[number] for number in undisturbed(shares)]
    steps = {mode: [steps[mode] for steps in used] for mode in MODES}
    costs = join(lanes, steps, "bubbles")
    planned = hidden_fraction(lanes["bubbles"].table, costs)
    row = figures(costs, planned, {mode: [step.seconds for step in steps[mode]] for mode in MODES})
    return {
        "images": len(grids),
        **row,
        "core share": statistics.median(shares),
        "rounds": f"{len(used)} of {rounds}",
        "all": [
            {mode: [step.seconds, step.core_share] for mode, step in steps.items()} for steps in measured
        ],
    }


def lane(rank: Any, table: Table, batches: list[dict[str, Any]], bundles: Bundles) -> Lane:
    """Proved, with the sums of gradients."""
    from parallel.pipeline.build import with_reductions
    from parallel.pipeline.check import check

    complete = with_reductions(table)
    check(complete, rows=rank.rows)
    return Lane(table, rank.executor(complete), batches, bundles)


def run(rank: Any, lane: Lane) -> Any:
    """One measured step."""
    if lane.bundles:
        rank.trainer.tower.load(lane.batches, lane.bundles)
    return rank.step(lane.executor, lane.batches)


def join(lanes: Mapping[str, Lane], steps: Mapping[str, Sequence[Any]], mode: str) -> Costs:
    """Medians of the language model's operations without images and of the tower's in `mode`.

    Parts of equally many images cost the same: the median of all of them.
    """
    from k3train.log.timeline import Recording, median_costs

    table = lanes["none"].table
    plain = median_costs(
        Recording(table.layout, table.name, {n: step.ranks for n, step in enumerate(steps["none"])})
    )
    bundles = lanes[mode].bundles
    spent: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps[mode]:
        for kind, part, microbatch, start, end in (event for ranks in step.ranks for event in ranks):
            if kind in (VISION_FORWARD, VISION_BACKWARD):
                spent[kind, len(bundles[microbatch][part])].append(end - start)
    forward, backward = (
        [[statistics.median(spent[kind, len(part)]) for part in parts] for parts in bundles]
        for kind in (VISION_FORWARD, VISION_BACKWARD)
    )
    return replace(plain, vision_forward=forward, vision_backward=backward, reduce=0)


def with_vision(costs: Costs, work: Sequence[Sequence[float]], bundles: Bundles) -> Costs:
    """Costs with the tower's in another unit, good enough to balance it alone."""
    forward = [
        [sum(row[item] for item in part) for part in parts] for row, parts in zip(work, bundles, strict=True)
    ]
    return replace(
        costs, vision_forward=forward, vision_backward=[[2 * cost for cost in row] for row in forward]
    )


def figures(costs: Costs, planned: float, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A row from the measured costs, the planned hidden fraction, and the seconds of every kind of step."""
    tower = sum(map(sum, costs.vision_forward)) + sum(map(sum, costs.vision_backward))
    model = (sum(costs.forward) + sum(costs.backward)) * len(costs.vision_forward)
    medians = {mode: statistics.median(values) for mode, values in seconds.items()}
    return {
        "tower share": tower / model,
        "fits": planned >= FITS,
        "planned": planned,
        "hidden": hidden(medians["bubbles"], medians["none"], tower),
        "fastest": hidden(min(seconds["bubbles"]), min(seconds["none"]), tower),
        "vs inline": medians["inline"] / medians["bubbles"],
        "vs phase": medians["phase"] / medians["bubbles"],
        **{f"{mode} ms": medians[mode] * 1e3 for mode in MODES},
        "spread": max(max(values) / min(values) for values in seconds.values()),
        "seconds": {mode: list(values) for mode, values in seconds.items()},
        "costs": {
            "forward": list(costs.forward),
            "backward": list(costs.backward),
            "vision_forward": [list(row) for row in costs.vision_forward],
            "vision_backward": [list(row) for row in costs.vision_backward],
        },
    }


def hidden(with_images: float, without: float, tower: float) -> float:
    """Share of the tower's seconds that a step hides; see `parallel.pipeline.vision_fill.hidden_fraction`."""
    return 1 - (with_images - without) * PIPELINE / tower


if __name__ == "__main__":
    main()

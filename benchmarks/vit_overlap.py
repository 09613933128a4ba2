"""The vision tower in the pipeline's bubbles, beside (a) the tower in line on the first stage and (b) a phase
of its own before and after the pipeline, balanced over all ranks.

Workload: the recipe's model (tiny without MTP on two CPU ranks of one core; on two GPUs 4 layers of
h200_small with a vocabulary of 8,192 and micro-batches of 8 sequences of 8,192 tokens, so that operations
take longer on the GPU than on the host) with a vision tower (on GPUs 4 blocks of MoonViT-V2, images of
64 x 64 patches), PP2, random tokens and images of one size, a sweep of images in a micro-batch.
A step is forward and backward of all micro-batches. A few steps measure what each operation costs, the
bubbles are filled with these costs. Then rounds of one step of each kind: without images (of the same
tokens), bubbles, inline, phase.

`hidden` is 1 - (T - T0) / (W / p): T the time from the first to the last operation in bubbles, T0 the same
without images, both medians, W what all the tower's operations took together. 0 is as long as with the
tower's work balanced over the ranks, 1 for nothing; `error` is its standard error, from the rounds' spread.
`planned` simulates the executed table with the medians of the same run, messages taken as free. `tower share`
is W over the language model's work; the plan fits where at least 80 % are planned as hidden. Speed-ups are
ratios of whole steps, with the sums of gradients.

`core share` is CPU time over the time of the operations: well below 1, the machine was not free. Figures come
from undisturbed rounds, with a share of 0.9 or more in every step; where one is disturbed another follows, up
to twice as many (none if quick). With fewer than three of them, all rounds count. One chunk on a rank and few
micro-batches make bubbles that are large beside the spread of the steps; --virtual 2 --microbatches 8 is the
usual, smaller case.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.ranks import FREE, run_ranks, undisturbed
from k3train.vision_shapes import Grid, image_cost
from parallel.pipeline.simulate import Costs
from parallel.pipeline.table import VISION_BACKWARD, VISION_FORWARD, Table
from parallel.pipeline.vision_fill import fill, hidden_fraction, inline, phase, plan_parts

PIPELINE = 2
FITS = 0.8
MODES = ("none", "bubbles", "inline", "phase")
CALIBRATION = 3
"""Steps whose medians the bubbles are filled with; the first step of all comes before them."""
CPU = (
    "recipe=tiny", "model.mtp_layers=0", "data.sequence_length=128",
    "vision=tiny", "vision.hidden_size=128", "vision.num_heads=4", "vision.ffn_size=512",
)  # fmt: skip
GPU = (
    "recipe=h200_small", "model.num_layers=4", "model.mtp_layers=0", "model.vocab_size=8192",
    "data.sequence_length=8192", "data.micro_batch_size=8", "run.deterministic=false",
    "vision=moonvit_v2", "vision.depth=4", "offload.sites.vit.layer=keep",
)  # fmt: skip
RESAMPLES = 300
SIDES = {"cpu": 8, "cuda": 64}
"""Patches along each side of an image."""
IMAGES = (2, 4, 6, 8)
QUICK_IMAGES = (4, 8)
QUICK = ("model.num_layers=6",)
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
    parser.add_argument("--virtual", type=int, default=1, help="chunks of a rank (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=6, help="of a step (%(default)s)")
    parser.add_argument("--rounds", type=int, help="undisturbed ones of each sweep point (15, quick 3)")
    parser.add_argument("overrides", nargs="*", help="configuration overrides behind the recipe's")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 15)
    arguments = {
        "images": sorted(options.images or (QUICK_IMAGES if options.quick else IMAGES)),
        "rounds": rounds,
        "most": rounds if options.quick else 2 * rounds,
        "overrides": [
            f"parallel.pipeline={PIPELINE}",
            f"parallel.virtual={options.virtual}",
            f"run.microbatches={options.microbatches}",
            *options.overrides,
        ],
        "quick": options.quick,
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
        "hidden_fraction_error": chosen["error"],
        "planned_hidden_fraction": chosen["planned"],
        "speedup_vs_inline": chosen["vs inline"],
        "speedup_vs_separate_phase": chosen["vs phase"],
        "no_longer_fits_at": next((row["images"] for row in rows if not row["fits"]), None),
    }


def measure(
    images: list[int], rounds: int, most: int, overrides: list[str], quick: bool
) -> list[dict[str, Any]]:
    """A row for each sweep point; on every rank."""
    import torch

    from benchmarks.common.pipelines import PipelineRank
    from k3train.schedule import pipeline_table

    cuda = torch.cuda.is_available()
    rank = PipelineRank([*(GPU if cuda else (*CPU, *(QUICK if quick else ()))), *overrides])
    side = SIDES["cuda" if cuda else "cpu"]
    table = pipeline_table(rank.config, rank.groups.topology)
    plain = lane(rank, table, rank.batches(), [])
    run(rank, plain)
    costs = model_costs(table, [run(rank, plain) for _ in range(CALIBRATION)])
    rows = [
        {"images": count, **sweep_point(rank, table, costs, [(1, side, side)] * count, rounds, most)}
        for count in images
    ]
    return rows


def sweep_point(
    rank: Any, table: Table, costs: Costs, grids: list[Grid], rounds: int, most: int
) -> dict[str, Any]:
    """Measure the tower, fill the bubbles, and run all kinds of step in turn.

    Args:
        table: of the language model.
        costs: of its stages.
        grids: of each micro-batch's images.
        rounds: undisturbed ones to reach.
        most: rounds after which to end without them.
    """
    vision, out_size = rank.config.vision, rank.config.model.hidden_size
    every = [grids] * table.layout.microbatches
    bundles = plan_parts([[image_cost(vision, out_size, grid) for grid in row] for row in every], PIPELINE)
    whole = [[list(range(len(grids)))] for _ in every]
    batches = rank.batches(every)
    plain = [{key: value for key, value in batch.items() if key != "grids"} for batch in batches]
    equal = [[1.0] * len(parts) for parts in bundles]
    first = lane(rank, phase(table, tower_costs(costs, equal, equal)), batches, bundles)
    costs = with_tower(costs, bundles, [run(rank, first) for _ in range(CALIBRATION)])
    lanes = {
        "none": lane(rank, table, plain, []),
        "bubbles": lane(rank, fill(table, costs), batches, bundles),
        "inline": lane(rank, inline(table, [1] * len(every)), batches, whole),
        "phase": lane(rank, phase(table, costs), batches, bundles),
    }
    measured, shares = measure_rounds(rank, lanes, rounds, most)
    used = [measured[number] for number in undisturbed(shares)]
    costs = model_costs(table, [steps["none"] for steps in used])
    costs = with_tower(costs, bundles, [steps["bubbles"] for steps in used])
    row = figures(costs, hidden_fraction(lanes["bubbles"].table, costs), used)
    done = {"core share": statistics.median(shares), "rounds": f"{len(used)} of {len(measured)}"}
    return {**row, **done, "all rounds": [seconds(steps) for steps in measured]}


def measure_rounds(
    rank: Any, lanes: Mapping[str, Lane], rounds: int, most: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """One step of each kind in every round, and each round's least core share, the same on every rank."""
    measured: list[dict[str, Any]] = []
    shares: list[float] = []
    while len(measured) < most and sum(share >= FREE for share in shares) < rounds:
        measured.append({mode: run(rank, lanes[mode]) for mode in MODES})
        shares.append(min(step.core_share for step in measured[-1].values()))
    return measured, shares


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


def model_costs(table: Table, steps: Sequence[Any]) -> Costs:
    """Medians of the language model's operations."""
    from k3train.log.timeline import Recording, median_costs

    recording = Recording(table.layout, table.name, {n: step.ranks for n, step in enumerate(steps)})
    return replace(median_costs(recording), reduce=0)


def with_tower(costs: Costs, bundles: Bundles, steps: Sequence[Any]) -> Costs:
    """Costs with the medians of the tower's operations: parts of equally many images cost the same."""
    spent: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for kind, part, microbatch, start, end in (event for events in step.ranks for event in events):
            if kind in (VISION_FORWARD, VISION_BACKWARD):
                spent[kind, len(bundles[microbatch][part])].append(end - start)
    forward, backward = (
        [[statistics.median(spent[kind, len(part)]) for part in parts] for parts in bundles]
        for kind in (VISION_FORWARD, VISION_BACKWARD)
    )
    return tower_costs(costs, forward, backward)


def tower_costs(costs: Costs, forward: list[list[float]], backward: list[list[float]]) -> Costs:
    """Costs with those of each part."""
    return replace(costs, vision_forward=forward, vision_backward=backward)


def seconds(steps: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of one round: whole step, first to last operation, and the core share."""
    return {mode: [step.seconds, step.makespan, step.core_share] for mode, step in steps.items()}


def figures(costs: Costs, planned: float, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row from the measured costs, the planned hidden fraction, and the rounds that count."""
    tower = sum(map(sum, costs.vision_forward)) + sum(map(sum, costs.vision_backward))
    model = (sum(costs.forward) + sum(costs.backward)) * len(costs.vision_forward)
    took = {mode: [steps[mode].seconds for steps in rounds] for mode in MODES}
    medians = {mode: statistics.median(values) for mode, values in took.items()}
    return {
        "tower share": tower / model,
        "fits": planned >= FITS,
        "planned": planned,
        "hidden": hidden(rounds, tower),
        "error": standard_error(rounds, tower),
        "vs inline": medians["inline"] / medians["bubbles"],
        "vs phase": medians["phase"] / medians["bubbles"],
        **{f"{mode} ms": medians[mode] * 1e3 for mode in MODES},
        "spread": max(max(values) / min(values) for values in took.values()),
        "costs": {
            "forward": list(costs.forward),
            "backward": list(costs.backward),
            "vision_forward": [list(row) for row in costs.vision_forward],
            "vision_backward": [list(row) for row in costs.vision_backward],
        },
    }


def hidden(rounds: Sequence[Mapping[str, Any]], tower: float) -> float:
    """Share of the tower's seconds that the median step hides."""
    with_images, without = (
        statistics.median(steps[mode].makespan for steps in rounds) for mode in ("bubbles", "none")
    )
    return 1 - (with_images - without) * PIPELINE / tower


def standard_error(rounds: Sequence[Mapping[str, Any]], tower: float) -> float:
    """Of `hidden`, by drawing as many rounds again and again."""
    draws = random.Random(0)
    return statistics.pstdev(
        hidden(draws.choices(list(rounds), k=len(rounds)), tower) for _ in range(RESAMPLES)
    )


if __name__ == "__main__":
    main()

"""Arithmetic of the pipeline's benchmarks, and one of them in real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import attn_res_traffic, pipeline_bubble, vit_overlap
from benchmarks.common.ranks import run_ranks, undisturbed
from k3train.log.timeline import Recording, compare
from parallel.pipeline.build import build
from parallel.pipeline.simulate import Costs, simulate, uniform
from parallel.pipeline.vision_fill import fill, hidden_fraction, phase

ROOT = Path(__file__).parents[2]
GROUPS = [[[0], [1]]] * 4
"""Four micro-batches of two images, each image a part."""


def events(timeline: Any, late: float = 0) -> list[list[tuple[str, int, int, float, float]]]:
    """What a clock would note, each rank `late` times its number later."""
    return [
        [
            (*op, start + late * rank, end + late * rank)
            for op, start, end in zip(ops, timeline.starts[rank], timeline.ends[rank], strict=True)
        ]
        for rank, ops in enumerate(timeline.table.ranks)
    ]


def test_bubble_of_an_exact_run_is_the_formula() -> None:
    table = build("interleaved", 2, 2, 4)
    recording = Recording(table.layout, table.name, {0: events(simulate(table, uniform(table.layout)))})
    row = pipeline_bubble.figures(compare(recording), [3.0, 1.0, 2.0], [4.0, 8.0, 4.0])
    assert row["formula"] == row["planned bubble"] == pytest.approx(1 / 8)
    assert row["planned idle"] == row["measured idle"] == pytest.approx(1 / 9)
    assert row["points"] == pytest.approx(0)
    assert (row["ms/step"], row["fastest"], row["slowest"]) == (2000, 1000, 3000)
    assert row["ratio"] == 2 / 4


def test_a_late_rank_is_seen_as_points() -> None:
    table = build("1f1b", 2, 1, 2)
    timeline = simulate(table, uniform(table.layout))
    recording = Recording(table.layout, table.name, {0: events(timeline, late=3)})
    row = pipeline_bubble.figures(compare(recording), [1.0], [1.0])
    # Work is 6 of 9 units on each rank in the plan; late by 3, rank 1 ends one behind rank 0.
    assert row["planned idle of ranks"] == pytest.approx([3 / 9, 3 / 9])
    assert row["measured idle of ranks"] == pytest.approx([4 / 10, 4 / 10])
    assert row["points"] == pytest.approx(100 * (4 / 10 - 3 / 9))


@pytest.mark.parametrize(
    ("layout", "cached", "published", "naive"), [((2, 2), 3, 5, 6), ((2, 3), 5, 9, 15), ((4, 2), 18, 22, 28)]
)
def test_traffic_counts_rows_both_ways_without_running_tensors(
    layout: tuple[int, int], cached: int, published: int, naive: int
) -> None:
    edges = layout[0] * layout[1] - 1
    step = 2 * 3 * 10
    row = attn_res_traffic.figures(*layout, 3, 10, step * (cached + edges), step * (naive + edges))
    assert (row["running"], row["cached"], row["formula"]) == (step * edges, step * cached, step * cached)
    assert (row["published"], row["naive"]) == (step * published, step * naive)
    assert attn_res_traffic.mismatches([row]) == []
    row["cached"] += 1
    (wrong,) = attn_res_traffic.mismatches([row])
    assert f"cached counts {step * cached + 1} bytes, the formula says {step * cached}" in wrong


def test_counted_bytes_equal_the_formula_in_real_ranks(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/attn_res_traffic.py", "--layout", "2x2", "--json", str(file)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == figures
    # 3 and 6 rows of 64 tokens of 64 FP32 numbers, 4 micro-batches, there and back.
    assert figures["cached_bytes"] == figures["formula_bytes"] == 2 * 4 * 3 * 64 * 64 * 4
    assert figures["naive_bytes"] == figures["naive_counted_bytes"] == 2 * figures["cached_bytes"]


def steps(mode_seconds: dict[str, float]) -> dict[str, Any]:
    """A round whose steps end with sums of gradients of 1 s."""
    return {
        mode: SimpleNamespace(seconds=span + 1, makespan=span, core_share=1.0)
        for mode, span in mode_seconds.items()
    }


def test_hidden_fraction_of_step_times() -> None:
    costs = Costs(
        [1.0] * 4, [2.0] * 4, vision_forward=[[0.5, 0.5]] * 4, vision_backward=[[1.0, 1.0]] * 4, reduce=0
    )
    rounds = [
        steps({"none": 10, "bubbles": 11.5, "inline": 19, "phase": 14}),
        steps({"none": 50, "bubbles": 50, "inline": 50, "phase": 50}),
        steps({"none": 9, "bubbles": 9, "inline": 9, "phase": 9}),
    ]
    row = vit_overlap.figures(costs, 0.75, rounds)
    assert row["tower share"] == 12 / 48
    assert row["hidden"] == 1 - 1.5 / (12 / 2)
    assert 0.1 < row["error"] < 0.3  # of rounds that hide 0.75, 1 and 1
    assert vit_overlap.standard_error(rounds[:1] * 3, 12) == 0
    assert (row["vs inline"], row["vs phase"]) == (20 / 12.5, 15 / 12.5)
    assert row["bubbles ms"] == 12500
    assert not row["fits"]


def test_hidden_fraction_of_a_simulated_step_is_the_plan() -> None:
    table = build("interleaved", 2, 2, 4)
    costs = vit_overlap.tower_costs(uniform(table.layout), [[0.25, 0.25]] * 4, [[0.5, 0.5]] * 4)
    kinds = {"none": table, "bubbles": fill(table, costs), "phase": phase(table, costs)}
    spans = {mode: simulate(kind, costs).makespan for mode, kind in kinds.items()}
    planned = hidden_fraction(kinds["bubbles"], costs)
    row = vit_overlap.figures(costs, planned, [steps({**spans, "inline": 1})])
    assert row["hidden"] == pytest.approx(planned)
    assert planned > 0.5


def test_tower_costs_are_medians_over_parts_of_one_size() -> None:
    table = build("1f1b", 2, 1, 4)
    bundles = [[[0], [1, 2]], [[0]], [], [[0, 1]]]
    noted = [("VF", 0, 0, 0.0, 1.0), ("VF", 1, 0, 0.0, 4.0), ("VF", 0, 1, 0.0, 3.0), ("VF", 0, 3, 0.0, 6.0)]
    noted += [("VB", *event[1:4], 2 * event[4]) for event in noted]
    step = SimpleNamespace(ranks=[noted[:3], [*noted[3:], ("F", 0, 0, 0.0, 9.0)]])
    costs = vit_overlap.with_tower(uniform(table.layout), bundles, [step])
    assert costs.vision_forward == [[2, 5], [2], [], [5]]
    assert costs.vision_backward == [[4, 10], [4], [], [10]]


def test_summary_names_the_last_point_that_fits_and_the_first_that_does_not() -> None:
    def row(images: int, planned: float) -> dict[str, Any]:
        fits = planned >= vit_overlap.FITS
        return {
            "images": images, "planned": planned, "fits": fits, "hidden": planned - 0.05, "error": 0.1,
            "vs inline": 2.0, "vs phase": 1.5,
        }  # fmt: skip

    top = vit_overlap.summary([row(2, 0.9), row(4, 0.8), row(6, 0.4), row(8, 0.3)])
    assert (top["images"], top["fits"], top["no_longer_fits_at"]) == (4, True, 6)
    assert (top["hidden_fraction"], top["planned_hidden_fraction"]) == (0.75, 0.8)
    none = vit_overlap.summary([row(6, 0.4), row(8, 0.3)])
    assert (none["images"], none["fits"], none["no_longer_fits_at"]) == (6, False, 6)


def test_disturbed_steps_are_left_out_where_enough_remain() -> None:
    assert undisturbed([1.0, 0.5, 0.95, 0.9, 0.89]) == [0, 2, 3]
    assert undisturbed([1.0, 0.5, 0.95]) == [0, 1, 2]


def test_a_rank_that_fails_ends_the_benchmark_with_its_words() -> None:
    with pytest.raises(SystemExit, match=r"2 ranks: rank \d exited with 1(?s:.*)No module named 'nowhere'"):
        run_ranks("nowhere:measure", 2, {}, timeout=60)


@pytest.mark.parametrize("script", ["pipeline_bubble", "attn_res_traffic", "vit_overlap"])
def test_help_explains_the_workload(script: str) -> None:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Workload: " in done.stdout
    assert "--json FILE" in done.stdout

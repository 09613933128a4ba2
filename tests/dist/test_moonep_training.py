"""Whole runs of the recipe with balanced experts: the losses of all-to-all, and what the run reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist import runs

STEPS, FIRST, BOUND = 20, 1e-6, 2e-2
"""Rounding grows: an update that has a gradient's sign, or a router's tie, turns on its last bits."""
SHORT = ["vision=none", "eval.every=0", "eval.batches=4", "checkpoint.every=0", "log.trace_steps=0"]
SMALL = ["data.sequence_length=64", "run.microbatches=2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return runs.prepare_text(tmp_path_factory.mktemp("data"))


def train(folder: Path, *overrides: str, timeout: float = 100) -> list[dict[str, Any]]:
    code, output = runs.train(["recipe=tiny", f"run.dir={folder}", *SHORT, *overrides], timeout)
    assert code == 0, output
    return runs.metrics(folder)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.timeout(900)
def test_twenty_steps_of_tiny_have_the_losses_of_all_to_all(
    ranks: int, data: list[str], tmp_path: Path
) -> None:
    layout = ["parallel=single", f"parallel.expert.size={ranks}", f"run.steps={STEPS}", *data]
    plain = train(tmp_path / "alltoall", *layout, timeout=400)
    balanced = train(tmp_path / "moonep", *layout, "parallel.expert.dispatcher=moonep", timeout=400)
    for key in ("loss", "grad_norm"):
        assert balanced[0][key] == pytest.approx(plain[0][key], rel=FIRST)
    losses = [[line["loss"] for line in run] for run in (balanced, plain)]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=BOUND)
    assert losses[0] != losses[1], "the two dispatchers add in different orders: this is one of them twice"


def test_a_run_reports_and_records_its_balance(data: list[str], tmp_path: Path) -> None:
    layout = ["parallel=ep2", "parallel.expert.dispatcher=moonep", "log.routing_steps=1", "run.steps=2"]
    lines = train(tmp_path / "run", *layout, *SMALL, *data)
    for line in lines:
        assert line["moe_rows_max_over_mean"] == line["moonep/max_over_mean_after"] == 1.0
        assert line["moonep/max_over_mean_before"] > 1
        assert 0 < line["moonep/rows_sent"] < line["moonep/entries_sent"]
        assert line["moonep/replicas_max"] >= 1
    traced = [json.loads(line) for line in (tmp_path / "run/routing-0.jsonl").read_text().splitlines()]
    layers = {entry["layer"] for entry in traced}
    # Eight MoE layers and the MTP layer, which has the number of decoder layers.
    assert layers == set(range(1, 10))
    assert {entry["step"] for entry in traced} == {1}
    assert sorted(entry["microbatch"] for entry in traced if entry["layer"] == 3) == [0, 1]
    for entry in traced:
        assert [len(rows) for rows in entry["counts"]] == [32, 32]
        assert [sum(rows) for rows in entry["counts"]] == [64 * 4, 64 * 4]

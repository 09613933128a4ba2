"""The planner's benchmark, its made-up routing, and the replay of a recorded trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import moonep_planner
from benchmarks.common import routing

ROOT = Path(__file__).parents[5]


def figures(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "benchmarks/moonep_planner.py", "--quick", "--repeats", "1", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_fill_is_balanced_and_the_others_are_not() -> None:
    found = figures("--ranks", "8", "--tokens", "256")
    rows = found["rows"]
    assert found["max_over_mean"] == 1 and found["plan_ms"] > 0
    assert {row["policy"] for row in rows} == {
        "fill", "none", "eplb", "eplb, drifted", "eplb, moved homes", "eplb, moved homes, drifted",
    }  # fmt: skip
    for row in rows:
        if row["policy"] == "fill":
            assert row["max_over_mean"] == 1 and 1 <= row["replicas_max"] <= found["replicas_max"]
        else:
            assert row["max_over_mean"] > 1
        assert (row["moved"] == 0) == (row["policy"] == "none")
        assert ("plan ms" in row) == ("moved homes" not in row["policy"])


def test_a_trace_is_replayed_with_dealt_experts(tmp_path: Path) -> None:
    # Experts 0 and 1 of four are busy. Dealt to two ranks, each has one of them; blockwise, rank 0 has both.
    lines = [{"layer": 3, "step": step, "counts": [[5, 5, 1, 1]]} for step in range(4)]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    (alone, *_) = moonep_planner.traced(file, None, blockwise=False)
    assert alone.counts.tolist() == [[5, 5, 1, 1]]
    for blockwise, counts, none in ((False, [5, 1, 5, 1], 1.0), (True, [5, 5, 1, 1], 20 / 12)):
        first, second = moonep_planner.traced(file, 2, blockwise=blockwise)
        assert (first.name, second.name) == ("layer 3 step 0", "layer 3 step 1")
        assert second.counts.tolist() == [counts, counts] == second.history[""][0].tolist()
        assert routing.count(second.choice, 4).tolist() == counts
        rows = moonep_planner.measure(second, repeats=1, every=1)
        found = {row["policy"]: row["max_over_mean"] for row in rows}
        assert found["none"] == pytest.approx(none) and found["fill"] == 1


def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with pytest.raises(SystemExit, match=r"trace\.jsonl: No such file"):
        routing.recorded(file)
    for text in ("", '{"loss": 1.0}\n', "not JSON\n", "[1]\n"):
        file.write_text(text)
        with pytest.raises(SystemExit, match="no routing-STAGE.jsonl"):
            routing.recorded(file)
    file.write_text(json.dumps({"layer": 0, "step": 1, "counts": [[1, 2, 3, 4]] * 2}))
    for ranks, words in ((3, "must divide the 4 experts"), (4, "at most 2, the sources")):
        with pytest.raises(SystemExit, match=words):
            list(moonep_planner.traced(file, ranks, blockwise=False))


@pytest.mark.parametrize("kind", ["uniform", "lognormal:5", "zipf:1.0", "hot:0.3"])
def test_choices_are_different_experts_as_often_as_they_are_popular(kind: str) -> None:
    popular = routing.popularity(kind, experts=64, seed=1)
    choice = routing.choices(popular, tokens=4000, top_k=6, seed=2)
    assert (choice.sort(1).values.diff(dim=1) > 0).all()
    wanted = routing._chances(popular, 6)
    assert wanted.sum().item() == pytest.approx(6) and wanted.max() <= 1
    share = routing.count(choice, 64) / 4000
    assert (share - wanted).abs().max() < 0.04
    assert torch.equal(choice, routing.choices(popular, tokens=4000, top_k=6, seed=2))


def test_gathered_counts_are_those_of_whole_ranks() -> None:
    popular = routing.popularity("zipf:1.2", experts=48)
    counts, choice = routing.gathered(popular, ranks=4, tokens=500, top_k=8, seed=1)
    assert counts.sum(1).tolist() == [4000] * 4
    assert counts.min() >= 0 and counts.max() <= 500
    assert torch.equal(counts[0], routing.count(choice, 48))

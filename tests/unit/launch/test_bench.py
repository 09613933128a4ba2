"""`k3train bench calibrate`: what it writes and refuses; the measurements themselves are a benchmark's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3train import calibration
from launch import bench, cli
from launch.compose import ready

TINY = ["recipe=tiny", "vision=none", "data.images=[]"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What would have been measured, on how many ranks; answers are made up."""
    asked: list[tuple[str, int]] = []

    def run(kind: str, overrides: Any, ranks: int, steps: int) -> list[Any]:
        asked.append((kind, ranks))
        layers = [
            {"layers": {"kda+moe": {"5": [rank + 1.0, 2.0]}}, "output": [0.1, 0.2]} for rank in range(ranks)
        ]
        answers: dict[str, list[Any]] = {
            "layers": layers,
            "coefficients": [{"efficiency.memory": 0.25, "launch_us": 3.0}],
            "collectives": [{"reduce": [1e-3, 2e9]}] * ranks,
        }
        return answers[kind]

    monkeypatch.setattr(bench, "_run", run)
    return asked


def test_a_calibration_is_written_and_can_be_used(measured, tmp_path: Path, capsys) -> None:
    file = tmp_path / "machine.json"
    assert cli.main(["bench", "calibrate", *TINY, "parallel=dp2", f"out={file}"]) == 0
    assert measured == [("coefficients", 1), ("layers", 1), ("layers", 2), ("collectives", 2)]
    printed = capsys.readouterr().out
    assert "cluster.efficiency.memory" in printed and f"cluster.calibration={file}" in printed
    config = ready([*TINY, "parallel=dp2", f"cluster.calibration={file}"], inputs=False)
    assert (config.cluster.efficiency.memory, config.cluster.launch_us) == (0.25, 3.0)
    found = calibration.of_shapes(config)
    assert found is not None and found.layer("kda+moe", 6) == (1.5, 2.0), "the median of both ranks"
    assert calibration.collective(config, "reduce") == (1e-3, 2e9)


def test_shapes_of_other_layouts_stay_in_the_file(measured, tmp_path: Path, capsys) -> None:
    file = tmp_path / "machine.json"
    for layout in ("parallel=dp2", "parallel=ep2"):
        assert cli.main(["bench", "calibrate", "--json", *TINY, layout, f"out={file}"]) == 0
    shapes = json.loads(file.read_text())["measured"]["shapes"]
    assert len(shapes) == 2 and all(set(by_ranks) == {"1", "2"} for by_ranks in shapes.values())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "bench: (nothing) is no bench; valid is calibrate"),
        (["calibrate", *TINY, "steps=0"], "steps=0: is not 1 or more"),
        (["calibrate", "recipe=tiny", "run.stepz=3"], "run.stepz"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], told: str, capsys) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert told in capsys.readouterr().err

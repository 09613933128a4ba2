"""What the benchmarks of quantisation measure hangs together."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from .test_benchmarks import quick

pytestmark = pytest.mark.timeout(180)


def test_mx_codec_counts_errors_by_rule(tmp_path: Path) -> None:
    figures = quick("mx_codec", tmp_path / "figures.json")
    errors = {(row["data"], row["format"], row["rule"]): row for row in figures["errors"]}
    assert len(errors) == 2 * 3 * 3
    for (_, _, rule), row in errors.items():
        assert row["idempotent"]
        assert all(value for key, value in row.items() if key.startswith("equal"))
        assert ("equal torchao" in row) == (importlib.util.find_spec("torchao") is not None)
        assert (row["clipped %"] == 0) == (rule == "ceil")
    weights = errors["weights", "mxfp4", "floor"]
    assert 11 < weights["rms %"] < 12 and 38 < weights["clipped %"] < 46
    assert 2 < errors["weights", "mxfp8_e4m3", "floor"]["rms %"] < 4
    assert {row["operation"] for row in figures["times"]} == {
        "round to mxfp4", "round to mxfp8", "pack", "unpack",
    }  # fmt: skip


def test_qat_overhead_trains_side_by_side(tmp_path: Path) -> None:
    rows = quick("qat_overhead", tmp_path / "figures.json")["rows"]
    without, held, not_held = rows
    assert without["apart"] == 0 and without["ratio"] == 1
    assert held["losses"] == not_held["losses"] != without["losses"]
    # Two steps behind one of warm-up; the first loss is that of the same weights, rounded.
    assert held["losses"][0] == pytest.approx(without["losses"][0], rel=1e-3)
    assert held["losses"][2] < held["losses"][0]
    assert 0 < held["apart"] < 0.2
    for row in rows:
        assert len(row["losses"]) == 3 and len(row["seconds"]) == 2
        assert row["fastest"] <= row["ms"] <= row["slowest"]


def test_qat_overhead_compares_what_ran_apart(tmp_path: Path) -> None:
    losses = {"without": [4.0, 3.0, 2.0, 1.0], "held": [4.0, 3.5, 2.0, 1.25]}
    for name, each in losses.items():
        row = {"system": name, "losses": each, "seconds": [2.0 if name == "held" else 1.0] * 3, "rank": 0}
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [row]}))
    files = [str(tmp_path / f"{name}.json") for name in losses]
    held = quick("qat_overhead", tmp_path / "figures.json", "--compare", *files)["rows"][1]
    assert (held["apart"], held["loss"]) == (0.5, 1.25)
    assert "ratio" not in held, "times of different runs"

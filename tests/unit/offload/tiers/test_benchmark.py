"""The quick form of the tiers' benchmark: every tier, both ways, and ratios that follow from its rates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.timeout(180)
def test_every_tier_is_held_to_its_bare_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/offload_tiers.py", "--quick", "--json", str(tmp_path / "figures.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert {"hardware", "torch", "commit"} <= figures["machine"].keys()
    rows = {(row["tier"], row["direction"], row["MiB"]): row for row in figures["rows"]}
    tiers = figures["fraction_of_raw"].keys()
    assert tiers <= {"host", "nvme", "peer"} and {"host", "nvme"} <= tiers == figures["tiers"].keys()
    assert rows.keys() == {(tier, way, size) for tier in tiers for way in ("out", "in") for size in (8, 1)}
    for (tier, way, size), row in rows.items():
        assert row["fraction_of_raw"] == pytest.approx(row["GB/s"] / row["raw GB/s"])
        assert 0 < row["slowest"] <= row["GB/s"] <= row["fastest"]
        if size == 8:
            assert figures["fraction_of_raw"][tier][way] == row["fraction_of_raw"]

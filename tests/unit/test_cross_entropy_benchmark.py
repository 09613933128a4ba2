"""The benchmark of the loss: its figures hang together, and what it says of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_benchmarks import quick

pytestmark = pytest.mark.timeout(180)


def test_chunks_take_a_share_of_the_memory(tmp_path: Path) -> None:
    figures = quick("cross_entropy", tmp_path / "figures.json", "--words", "4096", "--hidden", "64")
    rows = {row["backend"]: row for row in figures["rows"]}
    assert {"megatron", "chunked", "reference"} <= rows.keys() | figures["missing"].keys()
    assert rows["megatron"]["time"] == rows["megatron"]["memory"] == 1
    whole, weight = 256 * 4096 * 4 / 1e6, 64 * 4096 * 4 / 1e6
    for name, row in rows.items():
        assert row["weight MB"] == pytest.approx(weight)
        assert row["spread ms"][0] <= row["fwd+bwd ms"] <= row["spread ms"][1]
        assert float(row["loss error"]) < 1e-6 and float(row["worst gradient"]) < 1e-3
        assert (row["peak MB"] - weight > whole) == (name != "chunked")
    # A chunk of 2 MiB, features twice.
    assert 2.09 < rows["chunked"]["peak MB"] - weight < 2.5

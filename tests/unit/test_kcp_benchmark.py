"""The benchmark of KDA context parallelism in its quick form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_benchmarks import quick

pytestmark = pytest.mark.timeout(180)


def test_kcp_sends_as_much_at_every_length_and_swap_does_not(tmp_path: Path) -> None:
    figures = quick("kcp", tmp_path / "figures.json", "--repeats", "1")
    heads, width, ranks = 4, 16, 2
    assert figures["payload_bytes"] == {"cpu": dict.fromkeys(("256", "512"), heads * width * 2 * width * 4)}
    assert 0 < figures["max_error_vs_one_rank"] < 1e-5
    swapped = {row["T"]: row for row in figures["rows"] if row["way"] == "swap"}
    # Half of q, k, v, decay logits, betas and outputs of this rank's columns leave it.
    row = heads * (5 * width + 1) * 4
    assert {T: each["bytes"] for T, each in swapped.items()} == {T: T // ranks * row // 2 for T in (256, 512)}
    for each in figures["rows"]:
        one = next(row for row in figures["rows"] if row["way"] == "one" and row["T"] == each["T"])
        assert each["speedup"] == pytest.approx(one["ms"] / each["ms"])

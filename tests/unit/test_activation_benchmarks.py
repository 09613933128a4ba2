"""What the benchmarks of activations measure hangs together, and what they compute from it is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.activations import Samples, longest
from benchmarks.common.device_time import merged, summary

from .test_benchmarks import quick

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("most", [0, 512, 1024, 5000, 8192, 12345, 60000, 131072, 10**9])
def test_longest_finds_the_last_length_that_works(most: int) -> None:
    tried = []

    def works(length: int) -> bool:
        tried.append(length)
        return length <= most

    found = longest(works, start=8192, limit=131072, grain=1024, seconds=60)
    assert found == min(most // 1024 * 1024, 131072)
    assert len(tried) == len(set(tried)) <= 12 and max(tried) <= 131072


def test_longest_ends_in_time() -> None:
    assert longest(lambda length: True, start=1024, limit=10**6, grain=1024, seconds=0) == 0


def test_device_time_counts_what_runs_at_once_once() -> None:
    def event(category: str, name: str, begin: float, end: float) -> dict[str, object]:
        return {"cat": category, "name": name, "ts": begin, "dur": end - begin}

    found = summary(
        [
            event("kernel", "gemm", 0, 4000),
            event("kernel", "norm", 3000, 5000),
            event("kernel", "gemm", 8000, 10000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1000, 6000),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5500, 9000),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 10000, 10500),
            event("cpu_op", "aten::mm", 0, 20000),
            {"name": "process_name", "ph": "M"},
        ]
    )
    assert found == {"wall": 10.5, "computing": 7.5, "out": 5.0, "back": 3.5, "hidden": 5.0, "idle": 3.0}
    assert merged([(3, 5), (0, 1), (1, 2), (4, 4.5)]) == [(0, 2), (3, 5)]


def test_a_sample_says_what_it_saw() -> None:
    samples = Samples(seconds=[3.0, 1.0, 2.0], resting=5 * 10**9, peak=7 * 10**9)
    assert samples.median == 2 and samples.activations == 2 * 10**9
    assert str(samples) == "3.000 1.000 2.000 s, peak 7.0 GB, before 5.0 GB"


def test_activation_memory_counts_every_policy(tmp_path: Path) -> None:
    figures = quick("activation_memory", tmp_path / "figures.json", "--no-baseline")
    rows = {row["policy"]: row for row in figures["rows"]}
    keep = rows["keep"]
    assert keep["share"] == keep["ratio"] == keep["step ratio"] == 1
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["fwd+bwd ms"] / keep["fwd+bwd ms"])
        step = row["fwd+bwd ms"] + row["optimizer ms"]
        assert row["tokens/s"] == pytest.approx(256 / step * 1e3), "two micro-batches of 128 tokens"
        assert row["saved GB"] == pytest.approx(sum(row["sites"].values()), rel=1e-6)
    # Nothing moves, everything moves, moved bytes are a quarter of FP32's with a thirty-second for scales.
    host, saved = rows["host"]["places"], keep["saved GB"]
    assert keep["places"]["host"] == keep["places"]["nvme"] == 0
    assert (
        rows["host"]["saved GB"]
        == rows["nvme"]["saved GB"]
        == saved
        == pytest.approx(keep["places"]["device"])
    )
    assert host["host"] == pytest.approx(saved, rel=0.05) and host["nvme"] == 0
    assert rows["nvme"]["places"]["nvme"] > saved and rows["nvme"]["places"]["host"] == 0
    assert 0.25 * saved < rows["fp8_host"]["places"]["host"] < 0.5 * saved
    for name in ("recompute", "selective"):
        assert rows[name]["measured_over_plan"] == pytest.approx(1, abs=0.02)
    assert rows["recompute"]["saved GB"] < rows["selective"]["saved GB"] < saved
    for name in ("host", "nvme", "fp8_host", "mixed"):
        assert rows[name]["share"] < 0.4, "the window bounds what is left of it on the device"
    best = figures["verdict"]["policy"]
    assert best in rows and rows[best]["share"] <= 0.4


def test_activation_memory_compares_megatron_core_with_itself(tmp_path: Path) -> None:
    figures = quick("activation_memory", tmp_path / "figures.json", "--only-baseline")
    rows = {row["policy"]: row for row in figures["megatron_core"]}
    assert figures["rows"] == [] and list(rows) == ["keep", "full recompute", "selective recompute"]
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["fwd+bwd ms"] / rows["keep"]["fwd+bwd ms"])


def test_fp8_storage_is_held_to_a_copy(tmp_path: Path) -> None:
    figures = quick("fp8_storage", tmp_path / "figures.json")
    rows = {(row["implementation"], row["direction"]): row for row in figures["rows"]}
    assert figures["triton_refuses"] == "runs on cuda tensors, not cpu"
    for (_, direction), row in rows.items():
        copy = rows["copy", direction]
        assert row["of copy"] == pytest.approx(copy["us"] / row["us"])
        # 2 bytes of the source, one of the code, 1/32 of the scale.
        assert row["GB/s"] * row["us"] * 1e3 == pytest.approx((2 + 1 + 1 / 32) * 2**20)

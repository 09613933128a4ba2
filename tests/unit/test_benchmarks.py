"""Every benchmark runs in its quick form and ends with one JSON object whose figures hang together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import report
from k3train import shapes
from launch.compose import compose, resolve_layout

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(180)


def quick(script: str, file: Path, *arguments: str) -> dict[str, Any]:
    """Figures of a quick run: the last line of its output, which the file must hold too."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", "--quick", "--json", str(file), *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == figures
    assert {"hardware", "devices", "torch", "megatron_core", "commit"} <= figures["machine"].keys()
    return figures


def test_train_step_measures_both_systems_on_the_same_tokens(tmp_path: Path) -> None:
    ours, core = quick("train_step", tmp_path / "figures.json")["rows"]
    assert (ours["system"], core["system"]) == ("k3train", "megatron-core")
    for entry in (ours, core):
        assert entry["fastest"] <= entry["ms/step"] <= entry["slowest"]
        # Two micro-batches of 128 tokens.
        assert entry["tokens/s"] * entry["ms/step"] / 1e3 == pytest.approx(256)
    assert ours["ratio"] == pytest.approx(ours["tokens/s"] / core["tokens/s"])
    phases = sum(ours[name] for name in ("forward_backward", "optimizer", "balance"))
    assert 0 < 1e3 * phases <= ours["slowest"]


def test_muon_takes_its_share_of_a_step(tmp_path: Path) -> None:
    figures = quick("muon", tmp_path / "figures.json", "--repeats", "1")
    whole, rest = figures["forward_backward_seconds"], {row["optimizer"]: row for row in figures["rows"]}
    assert rest.keys() == figures["share_of_step"].keys() == {"adamw", "muon", "muon_per_head"}
    for name, share in figures["share_of_step"].items():
        seconds = rest[name]["ms"] / 1e3
        assert share == pytest.approx(seconds / (seconds + whole))
    # Heads are blocks of their own, and cheaper.
    assert rest["muon"]["blocks"] < rest["muon_per_head"]["blocks"]
    assert rest["muon_per_head"]["TFLOP"] < rest["muon"]["TFLOP"]
    assert len({row["parameters M"] for row in figures["rows"]}) == 1


def test_operators_are_held_to_their_references(tmp_path: Path) -> None:
    rows = quick("operators", tmp_path / "figures.json")["rows"]
    assert {entry["operator"] for entry in rows} == {"kda", "attn_res", "short_conv", "situ", "attention"}
    for entry in rows:
        assert 0 < entry["error"] < 2e-6, entry
        assert 0 < entry["worst gradient"] < 5e-6, entry
        if entry["backend"] in ("recurrent", "reference"):
            assert entry["speedup"] == 1
    reference = next(entry for entry in rows if entry["backend"] == "recurrent")
    chunk = next(entry for entry in rows if entry["backend"] == "chunk")
    assert chunk["speedup"] == pytest.approx(reference["fwd+bwd ms"] / chunk["fwd+bwd ms"])


def test_one_operator_at_chosen_lengths(tmp_path: Path) -> None:
    arguments = ("--op", "situ", "--tokens", "16", "--tokens", "32")
    rows = quick("operators", tmp_path / "figures.json", *arguments)["rows"]
    assert [(entry["operator"], entry["T"]) for entry in rows] == [("situ", 16)] * 2 + [("situ", 32)] * 2


def test_checkpoint_times_both_kinds_of_save(tmp_path: Path) -> None:
    figures = quick("checkpoint", tmp_path / "figures.json", "--folder", str(tmp_path))
    for kind in ("synchronous", "asynchronous"):
        seconds = figures[kind]
        assert len(seconds["blocked"]) == len(seconds["until published"]) == 2
        assert all(a <= b for a, b in zip(seconds["blocked"], seconds["until published"], strict=True))
    config = resolve_layout(compose(figures["workload"]["overrides"]), 1)
    # FP32 weights and a momentum of each, and a second moment of what Muon does not update.
    assert 8 < figures["synchronous"]["bytes"] / shapes.total(config.model) < 12
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_startup_times_every_command(tmp_path: Path) -> None:
    rows = quick("startup", tmp_path / "figures.json")["rows"]
    seconds = {entry["command"]: entry["seconds"] for entry in rows}
    assert list(seconds) == ["--help", "plan", "refusal", "doctor", "first step, cold", "first step, warm"]
    assert all(value > 0 for value in seconds.values())


def test_a_command_that_ends_otherwise_is_no_measurement() -> None:
    from benchmarks.startup import run

    with pytest.raises(SystemExit, match="ended with 2"):
        run(["train", "recipe=tiny", "model.top_k=1000"], (0,))


def test_table_aligns_and_marks_what_is_missing() -> None:
    text = report.table([{"name": "a", "ms": 1234.5}, {"name": "long", "ratio": 2.0}])
    assert text.splitlines() == [
        "name         ms  ratio",
        "   a  1,234.500      -",
        "long          -  2.000",
    ]


@pytest.mark.parametrize("script", ["train_step", "operators", "checkpoint", "startup"])
def test_help_explains_the_workload(script: str) -> None:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Workload: " in done.stdout
    assert "--json FILE" in done.stdout


def test_zero2_counts_its_gradients_and_its_disk(tmp_path: Path) -> None:
    figures = quick("zero2", tmp_path / "figures.json", "--folder", str(tmp_path))
    stock, sharded = figures["rows"]
    assert (stock["kind"], sharded["kind"]) == ("ZeRO-1", "ZeRO-2")
    assert stock["gradients"] == stock["formula"] == figures["zero1_bytes"]
    assert 0 <= figures["peak_gradient_bytes"] - figures["formula_bytes"] <= 4 * 4, "one NaN for each chunk"
    assert sharded["loss"] == pytest.approx(stock["loss"], rel=1e-6)
    assert figures["step_ratio_vs_zero1"] == sharded["ratio"] > 0
    assert figures["store_over_disk"] == pytest.approx(figures["store_gbps"] / figures["disk_gbps"])


def test_squares_are_compared_with_the_same_fragments(tmp_path: Path) -> None:
    figures = quick("attention_fragments", tmp_path / "figures.json")
    rows = {(row["rank"], row["way"]): row for row in figures["rows"]}
    assert rows.keys() == {
        ("-", "whole row"),
        *((n, way) for n in (0, 1) for way in ("squares", "reference")),
    }
    assert rows["-", "whole row"]["of ideal"] == pytest.approx(2)
    assert 0 < max(row["error"] for row in rows.values()) < 1e-5
    slowest = max(rows[rank, "squares"]["of ideal"] for rank in (0, 1))
    assert figures["of_ideal"]["squares"] == slowest

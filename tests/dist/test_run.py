"""A run from start to end, stopped, killed, damaged and continued: the same losses, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from k3train.log.panels import PANELS
from k3train.log.wandb_workspace import workspace
from tests.dist import runs

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_losses.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return runs.prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def straight(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    code, output = runs.train(runs.overrides(data, run_dir))
    assert code == 0, output
    assert "is complete" in output and "saved step-00000008" in output
    return run_dir


def wait_for_step(run_dir: Path, step: int, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        file = run_dir / "metrics.jsonl"
        if file.is_file() and len(file.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within {timeout} s")


def test_a_run_leaves_what_it_promises(straight: Path) -> None:
    names = {entry.name for entry in straight.iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "tensorboard",
        "trace.json",
        "report.html",
    } <= names
    lines = runs.metrics(straight)
    assert [line["step"] for line in lines] == list(range(1, runs.STEPS + 1))
    keys = {"loss", "mtp_loss", "grad_norm", "lr", "moe_rows_max_over_mean"}
    assert all(keys <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    trace = json.loads((straight / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}


ELSEWHERE = {
    "Held-out captions", "Codes found in the window", "Window of the stage", "Rows of a rank",
    "Model compute of a rank", "Model FLOP utilisation", "Skipped steps",
}  # fmt: skip
"""Panels of captions, needles, stages, expert groups and GPUs, which such a run has none of."""


def test_panels_show_what_a_run_writes(straight: Path) -> None:
    """Every number has its panel, and every panel a number, in wandb's names too."""
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    written = {name for line in lines for name, value in line.items() if isinstance(value, int | float)}
    written -= {"step", "stage_number"}
    assert [name for name in written if not any(panel.select([name]) for panel in PANELS)] == []
    empty = {panel.title for panel in PANELS if panel.section != "MoonEP" and not panel.select(written)}
    assert empty <= ELSEWHERE
    plots = [plot for section in workspace() for plot in section["panels"]]
    drawn = {
        name
        for plot in plots
        for name in written
        if name in plot.get("y", ()) or re.search(plot.get("metric_regex", "^$"), name)
    }
    assert drawn == written


def test_a_second_start_of_a_complete_run_changes_nothing(straight: Path, data: list[str]) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    code, output = runs.train(runs.overrides(data, straight))
    assert code == 0 and "complete at step 8" in output
    assert (straight / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_the_run_continues_bitwise(
    number: signal.Signals, straight: Path, data: list[str], tmp_path: Path
) -> None:
    arguments = runs.overrides(data, tmp_path / "run", "checkpoint.every=0")
    process = runs.start(arguments)
    wait_for_step(tmp_path / "run", 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    stopped = len(runs.metrics(tmp_path / "run"))
    assert process.returncode == (75 if stopped < runs.STEPS else 0), output
    if stopped < runs.STEPS:
        assert number.name in output and "the same command continues it" in output
    code, output = runs.train(arguments)
    assert code == 0, output
    assert runs.metrics(tmp_path / "run") == runs.metrics(straight)


def test_kill_9_of_a_rank_loses_no_complete_checkpoint(
    straight: Path, data: list[str], tmp_path: Path
) -> None:
    arguments = runs.overrides(data, tmp_path / "run", "fault.max_restarts=0")
    process = runs.start(arguments)
    wait_for_step(tmp_path / "run", 5)
    victim = next(pid for pid in children(process.pid) if rank_of(pid) == "1")
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    code, output = runs.train(arguments)
    assert code == 0, output
    assert "continuing" in output
    assert runs.metrics(tmp_path / "run") == runs.metrics(straight)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    straight: Path, data: list[str], tmp_path: Path
) -> None:
    arguments = runs.overrides(data, tmp_path / "run", "checkpoint.keep=0")
    code, output = runs.train([*arguments, "run.steps=4"])
    assert code == 0, output
    checkpoints = tmp_path / "run" / "checkpoints"
    flip_a_byte(checkpoints / "step-00000004")
    code, output = runs.train([*arguments, "run.steps=4"])
    assert code == 0, output
    assert "step-00000004 is damaged" in output and "behind step 2" in output
    for folder in checkpoints.iterdir():
        flip_a_byte(folder)
    code, output = runs.train([*arguments, "run.steps=6"])
    assert code == 2
    assert "none of the 2 checkpoints" in output and "Traceback" not in output


def test_divergence_stops_with_step_rank_layer_and_samples(data: list[str], tmp_path: Path) -> None:
    code, output = runs.train(runs.overrides(data, tmp_path / "run", "optim.lr=1e30", "optim.clip_norm=0"))
    assert code == 3
    found = [line for line in output.splitlines() if line.startswith("k3train: step ")]
    assert len(found) == 1, output
    assert all(word in found[0] for word in ("not finite", "rank ", "samples [")), found


def test_divergence_can_be_skipped_and_is_counted(data: list[str], tmp_path: Path) -> None:
    arguments = runs.overrides(
        data,
        tmp_path / "run",
        "optim.lr=1e30",
        "optim.clip_norm=0",
        "optim.skip_nonfinite=true",
        "run.steps=4",
    )
    code, output = runs.train([*arguments, "eval.every=0"])
    assert code == 0, output
    assert runs.metrics(tmp_path / "run")[-1]["skipped_steps"] >= 2


def test_another_model_is_refused_by_name(straight: Path, data: list[str]) -> None:
    code, output = runs.train(runs.overrides(data, straight, "model.num_experts=16"))
    assert code == 2
    assert "model.num_experts" in output and len(output.strip().splitlines()) == 1


@pytest.mark.parametrize(("name", "more"), [("text and digits", []), ("text", ["vision=none"])])
def test_golden_curve_of_tiny(name: str, more: list[str], data: list[str], tmp_path: Path) -> None:
    """The shipped recipe on a fixed text. Another kind of CPU may move the last digits."""
    golden = json.loads(GOLDEN.read_text())
    arguments = [f"run.dir={tmp_path}/run", *data, *golden["overrides"], *more]
    code, output = runs.train(["recipe=tiny", *arguments])
    assert code == 0, output
    losses = [line["loss"] for line in runs.metrics(tmp_path / "run")]
    assert losses == pytest.approx(golden["loss"][name], rel=2e-3)


def flip_a_byte(checkpoint: Path) -> None:
    """Damage the middle of a checkpoint's largest file."""
    largest = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def children(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def rank_of(pid: int) -> str | None:
    """RANK in a process's environment."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    values = [entry[5:].decode() for entry in entries if entry.startswith(b"RANK=")]
    return values[0] if values else None

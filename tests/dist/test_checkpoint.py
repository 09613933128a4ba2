"""Resume is bitwise, and no interruption or damage makes a run load something wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.folders import available, complete
from k3train.checkpoint.verify import verify

from .launch import run_workers, start_workers, stop_workers

LAYOUTS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "one process": (1, False, {"layout": {}}),
    "pipeline 2 x virtual 2": (2, False, {"layout": {"pipeline": 2, "virtual": 2}}),
    "expert 2 x data 2, asynchronous": (2, True, {"layout": {"expert": 2, "data": 2}}),
    "context 2 x pipeline 2, asynchronous": (4, True, {"layout": {"context": 2, "pipeline": 2}}),
    "balanced experts, asynchronous": (2, True, {"layout": {"expert": 2, "data": 2}, "policy": "fill"}),
    "experts copied by past loads": (2, False, {"layout": {"expert": 2, "data": 2}, "policy": "eplb"}),
    "muon, asynchronous": (1, True, {"layout": {}, "optimizer": "muon"}),
    "bfloat16, not sharded": (1, False, {"layout": {"zero": 0}, "dtype": "bfloat16"}),
    "bfloat16, muon": (1, False, {"layout": {}, "optimizer": "muon", "dtype": "bfloat16"}),
    "bfloat16, sharded": (1, False, {"layout": {}, "dtype": "bfloat16"}),
    "per-head muon, not sharded": (1, False, {"layout": {"zero": 0}, "optimizer": "muon_per_head"}),
    "per-head muon, sharded, expert 2 x data 2, asynchronous": (
        2,
        True,
        {"layout": {"expert": 2, "data": 2}, "optimizer": "muon_per_head"},
    ),
    "bfloat16, per-head muon, sharded over 2, pipeline 2 x virtual 2": (
        4,
        False,
        {
            "layout": {"pipeline": 2, "virtual": 2, "data": 2},
            "optimizer": "muon_per_head",
            "dtype": "bfloat16",
        },
    ),
    "bfloat16, per-head muon, not sharded": (
        1,
        True,
        {"layout": {"zero": 0}, "optimizer": "muon_per_head", "dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_bitwise(name: str, tmp_path: Path) -> None:
    world_size, asynchronous, config = LAYOUTS[name]
    args = {"root": str(tmp_path / "checkpoints"), "asynchronous": asynchronous, "config": config}
    for whole, rest in run_workers("tests.dist.checkpoint_runs:straight_and_resumed", world_size, args):
        assert whole["published"] is True, whole["told"]
        assert rest["extra"] == {"step": 3, "share": 0.1}
        assert rest["drawn"] == whole["drawn"]
        assert rest["losses"] == whole["losses"]
        assert rest["tensors"] == whole["tensors"]
        assert rest["own_counters"] == rest["counters"] > 0


def test_experts_keep_their_numbers_in_every_layout(tmp_path: Path) -> None:
    args: dict[str, Any] = {"root": str(tmp_path / "checkpoints")}
    halves = run_workers(
        "tests.dist.checkpoint_runs:trained_weights",
        2,
        {**args, "config": {"layout": {"expert": 2, "data": 2}}},
    )
    saved = halves[0] | halves[1]
    own = [name for half in halves for name in half if ".experts." in name]
    assert len(own) == len(set(own)) > 0 and len(halves[0]) == len(halves[1])
    for ranks in (1, 4):
        layout = {"expert": ranks, "data": ranks}
        parts = run_workers(
            "tests.dist.checkpoint_runs:loaded_weights", ranks, {**args, "config": {"layout": layout}}
        )
        for part in parts:
            assert part.items() <= saved.items()
        assert set().union(*parts) == saved.keys()


def test_damage_is_found_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    (answers,) = run_workers("tests.dist.checkpoint_runs:damaged", 1, {"root": str(tmp_path / "checkpoints")})
    assert answers["nothing"] == ["2"]
    assert answers["partial"] == ["1", "removed step-00000002.partial, which an interrupted save left behind"]
    for name, reason in {
        "torn file": "has 1000 bytes and should have",
        "flipped bit": "does not match its checksum",
        "missing file": "is missing",
        "torn manifest": "manifest.json is missing or torn",
    }.items():
        step, message = answers[name]
        assert step == "1"
        assert message.startswith("step-00000002 is damaged (")
        assert reason in message


def test_refuses_another_configuration_and_survives_a_full_disk(tmp_path: Path) -> None:
    (answers,) = run_workers("tests.dist.checkpoint_runs:refused", 1, {"root": str(tmp_path / "checkpoints")})
    assert answers == [
        "step-00000001 was made with model.top_k=2 (now 3), optim.lr=0.002 (now 0.5); "
        "set the old value again, or start a new run in another run.dir",
        "saved step-00000001",
        "could not save step-00000002: rank 0: [Errno 27] File too large",
        "saved step-00000003",
        "step-00000001",
        "step-00000003",
    ]


@pytest.mark.parametrize("victims", [[1], [0, 1]], ids=["one rank", "all ranks"])
def test_kill_9_while_saving_loses_no_complete_checkpoint(victims: list[int], tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    _save_until_killed(root, tmp_path, victims, after=2)
    intact = available(root)
    assert intact
    assert all(verify(complete(root, step)) == [] for step in intact)
    _save_until_killed(root, tmp_path, victims, after=1)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["step"] == intact[-1]
    assert report["same"] is True
    assert available(root)[-1] > intact[-1]


def _save_until_killed(root: Path, folder: Path, victims: list[int], after: int) -> None:
    """Start the ranks, kill some once `after` more steps have been saved and another save runs."""
    workers = start_workers("tests.dist.checkpoint_runs:save_for_ever", 2, {"root": str(root)}, folder)
    try:
        first = max(available(root), default=0)
        deadline = time.monotonic() + 90
        while max(available(root), default=0) < first + after or not list(root.glob("*.partial")):
            assert time.monotonic() < deadline, (folder / "0.out").read_text()
            time.sleep(0.002)
        for victim in victims:
            os.kill(workers[victim].pid, signal.SIGKILL)
        for worker in workers:
            assert worker.wait(timeout=30) != 0
    finally:
        stop_workers(workers)

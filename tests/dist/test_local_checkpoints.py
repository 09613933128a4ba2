"""Checkpoints on the disks of the nodes: parts that make one, uploads that fail, disks that are lost."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.folders import available

from . import curriculum_runs
from .launch import run_workers, start_workers, stop_workers
from .runs import metrics, prepare_text

DP2: dict[str, Any] = {"layout": {"data": 2}, "optimizer": "muon_per_head"}
PP2 = {**DP2, "layout": {"pipeline": 2}}
UPLOAD_FAILED = "could not upload step-00000004: [Errno 17] File exists"


def _state(answers: list[Any]) -> list[dict[str, str]]:
    """Digests by name on each rank, but for what a step counts for itself alone."""
    return [
        {name: digest for name, digest in answer["tensors"].items() if not name.endswith("largest_logit")}
        for answer in answers
    ]


def _run(target: str, folder: Path, ranks: int = 2, **more: Any) -> list[Any]:
    args = {"root": str(folder / "checkpoints"), "disks": str(folder / "disks"), **more}
    return run_workers(f"tests.dist.local_runs:{target}", ranks, args)


def test_parts_on_two_nodes_make_a_checkpoint_in_any_layout(tmp_path: Path) -> None:
    saved = _run("saved", tmp_path, config=DP2)
    told = saved[0]["told"]
    assert told[:3] == [
        "saved step-00000002 on the local disks",
        "saved step-00000002",
        "saved step-00000004 on the local disks",
    ]
    assert told[3].startswith(UPLOAD_FAILED)
    assert told[3].endswith("it stays on the local disks") and len(told) == 4
    assert [answer["published"] for answer in saved] == [[True, True]] * 2
    assert available(tmp_path / "checkpoints") == [2]
    parts = sorted((tmp_path / "disks").glob("*/*/step-00000004/*.distcp"))
    assert [path.parts[-4] for path in parts] == ["node0", "node1"]

    # Nodes come back in another order, and rank 0 alone has written the weights that all read.
    shutil.copytree(tmp_path, tmp_path / "again")
    nodes = tmp_path / "again" / "disks"
    (nodes / "node0").rename(nodes / "node")
    (nodes / "node1").rename(nodes / "node0")
    (nodes / "node").rename(nodes / "node1")
    again = _run("loaded", tmp_path / "again", config=DP2)
    assert [answer["step"] for answer in again] == [4, 4]
    assert _state(again) == _state(saved)
    assert not list((tmp_path / "again" / "disks").glob("*/*/*.partial"))

    # Through a pipeline into the run's folder, and back into the first layout, without any disk.
    (moved, _) = _run("loaded", tmp_path, config=PP2, save_as=5)
    assert moved["step"] == 4
    shutil.rmtree(tmp_path / "disks")
    back = _run("loaded", tmp_path, config=DP2)
    assert [answer["step"] for answer in back] == [5, 5]
    assert _state(back) == _state(saved)


def test_what_a_node_has_lost_comes_from_the_runs_folder(tmp_path: Path) -> None:
    config = {"layout": {"data": 2}}
    _run("saved", tmp_path, config=config)
    for name in ("gone", "damaged", "other run"):
        shutil.copytree(tmp_path / "disks", tmp_path / name / "disks")
        shutil.copytree(tmp_path / "checkpoints", tmp_path / name / "checkpoints")
    shutil.rmtree(tmp_path / "gone" / "disks" / "node1")
    assert [answer["step"] for answer in _run("loaded", tmp_path / "gone", config=config)] == [2, 2]

    (shard,) = (tmp_path / "damaged" / "disks" / "node1").glob("*/step-00000004/*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    damaged = _run("loaded", tmp_path / "damaged", config=config)
    assert [answer["step"] for answer in damaged] == [2, 2]
    expected = f"the content of {shard.name} does not match its checksum"
    assert any(
        text == f"step-00000004 on a local disk is damaged ({expected}); trying the run's folder"
        for text in damaged[0]["told"]
    )

    # A folder of the same name in which another run began.
    shutil.rmtree(tmp_path / "other run" / "checkpoints")
    assert [answer["step"] for answer in _run("loaded", tmp_path / "other run", config=config)] == [0, 0]


@pytest.mark.slow
def test_ranks_of_one_node_share_its_disk(tmp_path: Path) -> None:
    config = {"layout": {"pipeline": 2, "virtual": 2}}
    saved = _run("saved", tmp_path, config=config, nodes=False)
    (folder,) = (tmp_path / "disks").glob("*/step-00000004")
    assert len(list(folder.glob("*.distcp"))) == 2
    again = _run("loaded", tmp_path, config=config, nodes=False)
    assert [answer["step"] for answer in again] == [4, 4]
    assert _state(again) == _state(saved)
    assert _run("loaded", tmp_path, ranks=1, config={"layout": {}}, nodes=False)[0]["step"] == 4


def test_saves_that_come_due_too_early_are_left_out_or_stay_local(tmp_path: Path) -> None:
    (answer,) = _run("pressed", tmp_path, ranks=1)
    assert answer["taken"] == [True, False, True, True]
    assert answer["told"] == [
        "step 2 is not saved: the save before is still written",
        "saved step-00000001 on the local disks",
        "step 3 stays on the local disks: an upload is still going on",
        "saved step-00000003 on the local disks",
        "saved step-00000001",
        "saved step-00000004 on the local disks",
        "saved step-00000004",
    ]
    assert answer["steps"] == [["step-00000001", "step-00000004"], ["step-00000003", "step-00000004"]]


def test_a_local_disk_that_fails_loses_no_save(tmp_path: Path) -> None:
    answers = _run("lost_disk", tmp_path)
    assert [(answer["published"], answer["newest"]) for answer in answers] == [(True, True)] * 2
    root = tmp_path / "checkpoints"
    assert answers[0]["told"] == [
        "could not save step-00000001: [Errno 17] File exists: "
        f"'{tmp_path}/disks/node1/k3train-{(root / 'run-id').read_text()}/step-00000001.partial'",
        f"from now on checkpoints go straight to {root}, not to the local disks",
        "saved step-00000001",
        "saved step-00000002",
    ]
    assert available(root) == [1, 2]


def test_a_folder_that_cannot_be_used_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    args = {"root": str(tmp_path / "checkpoints"), "folder": "$K3TRAIN_NOT_SET/disks"}
    answers = run_workers("tests.dist.local_runs:joined", 2, args)
    expected = "K3TRAIN_NOT_SET is not set in the environment; set it on every node, or name a folder"
    assert answers == [f"checkpoint.local_dir=$K3TRAIN_NOT_SET/disks: rank 0: {expected}"] * 2


def test_kill_9_during_an_upload_loses_nothing_of_the_local_parts(tmp_path: Path) -> None:
    root, disks = tmp_path / "checkpoints", tmp_path / "disks"
    disks.mkdir()
    args = {"root": str(root), "disks": str(disks)}
    workers = start_workers("tests.dist.local_runs:held_up", 2, args, tmp_path)
    try:
        deadline = time.monotonic() + 90
        while len(list(disks.glob("stopped-*"))) < 2 or len(list(disks.glob("*/*/step-00000002"))) < 2:
            assert time.monotonic() < deadline, (tmp_path / "0.out").read_text()
            time.sleep(0.01)
    finally:
        stop_workers(workers)
    assert available(root) == [1] and (root / "step-00000002.partial").is_dir()
    answers = _run("loaded", tmp_path, config={"layout": {"data": 2}})
    assert [answer["step"] for answer in answers] == [2, 2]
    assert answers[0]["told"] == ["removed step-00000002.partial, which an interrupted save left behind"]


def test_a_run_in_stages_goes_on_from_the_nodes_in_a_stage_that_its_folder_has_not_reached(
    tmp_path: Path,
) -> None:
    run_dir, disks = tmp_path / "run", tmp_path / "disks"
    arguments = curriculum_runs.overrides(
        prepare_text(tmp_path), run_dir, "checkpoint.local_dir=$K3TRAIN_TEST_DISK", "checkpoint.local_keep=9"
    )
    args = {"arguments": arguments, "disks": str(disks)}
    assert run_workers("tests.dist.local_runs:stages", 2, args) == [[0, 0], [0, 0]]
    whole = metrics(run_dir)
    # Ends of stages, and of the run, wait for their uploads.
    assert {3, 6, 8} <= set(available(run_dir / "checkpoints"))
    for step in available(run_dir / "checkpoints"):
        if step > 3:
            shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
    for step in (7, 8):
        for folder in disks.glob(f"*/*/step-{step:08d}"):
            shutil.rmtree(folder)
    assert run_workers("tests.dist.local_runs:stages", 2, args) == [[0, 0], [0, 0]]
    assert metrics(run_dir) == whole
    assert (run_dir / "checkpoints" / "step-00000008").is_dir()

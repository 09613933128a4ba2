"""A checkpoint continues in any layout: every number of model and optimizer is read from where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from k3train.checkpoint.folders import complete

from .launch import run_workers

PP2 = {"pipeline": 2, "virtual": 2}
EP2 = {"expert": 2, "data": 2}
MOVES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "AdamW, one rank to pipeline 2 x virtual 2": ({}, PP2, {}),
    "AdamW, pipeline 2 x virtual 2 to expert 2 x data 2": (PP2, EP2, {}),
    "AdamW, expert 2 x data 2 to one rank": (EP2, {}, {}),
    "AdamW, data 2 to context 2": ({"data": 2}, {"context": 2}, {}),
    "AdamW, whole to sharded over 2": ({"zero": 0}, {"data": 2, "zero": 2}, {}),
    "BF16 AdamW, sharded over 2 to whole": ({"data": 2}, {"zero": 0}, {"dtype": "bfloat16"}),
    "Muon, one rank to expert 2 x data 2": ({}, EP2, {"optimizer": "muon"}),
    "BF16 Per-Head Muon, expert 2 x data 2 to pipeline 2 x data 2": (
        EP2,
        {"pipeline": 2, "data": 2},
        {"optimizer": "muon_per_head", "dtype": "bfloat16"},
    ),
}


SLOW = tuple(
    name for name in MOVES if name.startswith(("AdamW, pipeline", "AdamW, expert", "Muon", "BF16 AdamW"))
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MOVES]
)
def test_state_is_the_same_in_another_layout(name: str, tmp_path: Path) -> None:
    before, after, rest = MOVES[name]
    if rest.get("optimizer") == "muon":
        before, after = {**before, "zero": 0}, {**after, "zero": 0}
    root = str(tmp_path / "checkpoints")
    _run("saved_in", before, rest, root)
    ranks = _run("moved_to", after, rest, root)
    assert ranks[0]["told"] == ["saved step-00000003"]
    first, second = (_contents(complete(Path(root), step)) for step in (2, 3))
    assert first.keys() == second.keys()
    states = [key for key in first if key.startswith("optimizer.")]
    assert any(".experts." in key for key in states) and any("mtp." in key for key in states)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
        if key.startswith("optimizer."):
            assert value.any() or "attention_res" in key or "mlp_res" in key, f"{key} is all zero"


def _run(target: str, layout: dict[str, Any], rest: dict[str, Any], root: str) -> list[Any]:
    sizes = [layout.get(axis, 1) for axis in ("pipeline", "context", "data")]
    config = {"layout": layout, **rest}
    world_size = sizes[0] * sizes[1] * sizes[2]
    return run_workers(f"tests.dist.checkpoint_runs:{target}", world_size, {"root": root, "config": config})


def _contents(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = FileSystemReader(folder)
    tensors = {
        key: torch.full(entry.size, float("nan")).to(entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors

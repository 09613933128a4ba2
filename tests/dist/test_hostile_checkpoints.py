"""A checkpoint is data: pickles planted in any of its files run nothing, and are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.unpickling import REMEDY

from .hostile_runs import DEEP, ODDITIES, PLACES, alive, payloads
from .launch import run_workers

READ_FROM_WEIGHTS = ("the table", "a weight", "a place outside the folder", "a change of a class")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("hostile") / "checkpoints"
    return dict(run_workers("tests.dist.hostile_runs:planted", 1, {"root": str(root)})[0])


def test_every_payload_is_alive(tmp_path: Path) -> None:
    assert alive(str(tmp_path)) == list(payloads(tmp_path))


def test_nothing_runs(planted: dict[str, dict[str, Any]]) -> None:
    assert len(planted) == len(PLACES) + 5 + len(DEEP) + len(ODDITIES)
    assert [name for name, said in planted.items() if said["ran"]] == []


def test_a_run_does_not_go_on_from_it(planted: dict[str, dict[str, Any]]) -> None:
    for name, said in planted.items():
        assert REMEDY in said["resume"] and "\n" not in said["resume"], name


def test_weights_are_not_taken_from_what_would_be_read(planted: dict[str, dict[str, Any]]) -> None:
    for name, said in planted.items():
        touched = any(name.endswith(part) for part in READ_FROM_WEIGHTS)
        assert bool(said["weights"]) == touched, name


def test_verify_finds_it(planted: dict[str, dict[str, Any]]) -> None:
    for name, said in planted.items():
        # Bytes of a tensor are numbers to torch; whoever unpickles them is refused at loading.
        assert bool(said["verify"]) == (name != "pickled bytes as an extra state"), name


@pytest.mark.parametrize(
    ("name", "culprit"),
    [
        ("os.system in the table", ".metadata: posix.system would run code"),
        ("exec in the table", ".metadata: builtins.exec would run code"),
        ("getattr in the table", ".metadata: builtins.getattr would run code"),
        ("exec in the random states", ": exec would run code"),
        ("nested torch.load in the random states", ": functools.partial would run code"),
        ("os.system in a moment", "posix.system would run code"),
        ("os.system in common.pt", "common.pt: no checkpoint of k3train has this file"),
        ("a place outside the folder", "'../elsewhere' leads out of the checkpoint's folder"),
        ("a change of a class", "an assignment to a class would run code"),
        ("pickled bytes as an extra state", "_extra_state, a pickle of Tensor, would run code"),
    ],
)
def test_the_culprit_is_named(name: str, culprit: str, planted: dict[str, dict[str, Any]]) -> None:
    assert culprit in planted[name]["resume"]

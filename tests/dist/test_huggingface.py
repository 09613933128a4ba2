"""Released weights go straight into any layout: each rank holds what the folder says, masters included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.huggingface.importing import import_folder
from tests.unit.checkpoint.huggingface import released

from .launch import run_workers

CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "pipeline 2 x virtual 2": {"layout": {"pipeline": 2, "virtual": 2}},
        "pipeline 2 x virtual 2, tower": {"layout": {"pipeline": 2, "virtual": 2}, "vision": True},
    },
    4: {
        "pipeline 2 x virtual 2 x expert 2": {
            "layout": {"pipeline": 2, "virtual": 2, "data": 2},
            "expert": {"size": 2},
        },
        "balanced experts, sharded gradients, per-head muon": {
            "layout": {"pipeline": 2, "virtual": 2, "data": 2, "zero": 2},
            "expert": {"size": 2, "dispatcher": "moonep"},
            "optimizer": "muon_per_head",
        },
    },
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same weights packed, and imported as a run."""
    root = tmp_path_factory.mktemp("released")
    config = released.tree(packed=True)
    packed = released.save(root / "packed", config, released.packed_weights(config)[0])
    import_folder(packed, root / "imported", workers=1, limit=200_000)
    return [str(packed), str(root / "imported")]


@pytest.mark.parametrize("ranks", CASES)
def test_every_rank_loads_its_own_tensors(ranks: int, sources: list[str]) -> None:
    args = {"source": sources[0], "sources": sources, "cases": CASES[ranks]}
    answers = run_workers("tests.dist.huggingface_worker:load", ranks, args, timeout=180)
    for number, (name, case) in enumerate(
        (name, case) for name, case in CASES[ranks].items() for _ in sources
    ):
        told = [answer[number] for answer in answers]
        assert all(answer["case"] == f"{name} {Path(sources[number % 2]).name}" for answer in told)
        assert [answer["wrong"] for answer in told] == [[]] * ranks, name
        assert [answer["after"] for answer in told] == [[]] * ranks, name
        # Who holds the last chunk also holds MTP, which no release has.
        assert {part for answer in told for part in answer["absent"]} == {"mtp"}
        layers = {layer for answer in told for chunk in answer["layers"] for layer in chunk}
        assert layers == set(range(5))
        assert all(answer["count"] > (20 if case.get("vision") else 10) for answer in told)


def test_a_missing_tower_stays_as_it_is_and_is_told(tmp_path: Path) -> None:
    config = released.tree(vision=False)
    source = released.save(tmp_path / "text", config, released.weights(config))
    with_tower = released.tree()
    other = released.save(tmp_path / "both", with_tower, released.weights(with_tower))
    args = {
        "source": str(other),
        "sources": [str(source)],
        "cases": {"tower": {"vision": True}},
    }
    ((answer,),) = run_workers("tests.dist.huggingface_worker:load", 1, args)
    assert answer["absent"] == ["mtp", "vision"]
    assert all(name.startswith("vision.") for name in answer["wrong"]) and answer["wrong"]

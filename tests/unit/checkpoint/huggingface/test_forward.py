"""What an imported checkpoint computes, against one plain file written from the specification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.checkpoint.huggingface.exporting import export_run
from k3train.checkpoint.huggingface.importing import import_folder
from k3train.checkpoint.huggingface.keys import Layout
from k3train.config_file import load_yaml, to_yaml
from tests.dist.launch import run_workers
from tests.unit.checkpoint.huggingface import released

WORKERS = "tests.unit.checkpoint.huggingface.workers"
KINDS = {"attention", "mlp", "kda", "router", "latent"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("released")
    plain, packed = released.tree(), released.tree(packed=True)
    return {
        "plain": str(released.save(root / "plain", plain, released.weights(plain))),
        "packed": str(released.save(root / "packed", packed, released.packed_weights(packed)[0])),
    }


@pytest.fixture(scope="module")
def differences(folders: dict[str, str]) -> Any:
    (answer,) = run_workers(f"{WORKERS}:compare", 1, {"folders": folders})
    return answer


@pytest.mark.parametrize("name", ["plain", "packed"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-10)])
def test_logits_and_intermediate_values_agree(differences: Any, name: str, dtype: str, bound: float) -> None:
    found = differences[f"{name} {dtype}"]
    assert found["logits"] < bound
    assert found["spread"] > 0.3
    assert {kind: error for kind, error in found.items() if kind in KINDS and not error < bound} == {}
    assert found.keys() >= KINDS


def test_an_export_holds_the_numbers_that_quantised_training_computed_with(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """The rounding of scales is the run's own."""
    pairs = {}
    for rounding in ("floor", "ceil", "even"):
        run, target = tmp_path / f"run-{rounding}", tmp_path / rounding
        import_folder(Path(folders["plain"]), run, workers=1, limit=10**9)
        config = load_yaml(run / "config.yaml")
        config.quant.scale_rounding = rounding
        (run / "config.yaml").write_text(to_yaml(config))
        export_run(run, target, layout=Layout(packed=True), workers=1, limit=10**9)
        pairs[rounding] = [folders["plain"], str(target)]
    (same,) = run_workers(f"{WORKERS}:quantised", 1, {"pairs": pairs})
    assert same == dict.fromkeys(pairs, True)


def test_features_of_an_image_agree(differences: Any) -> None:
    assert differences["image"] < 1e-10


def test_a_run_starts_from_released_weights_and_gives_them_back(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """Two steps of no length: what is exported is what was imported, but for the balance of the routers."""
    overrides = [
        "recipe=tiny", "parallel=single", "vision=none", "optim=adamw", "optim.lr=0", "optim.weight_decay=0",
        "run.steps=2", "run.microbatches=1", "data.sequence_length=32", "eval.batches=1", "eval.every=0",
        "log.trace_steps=0", "log.tensorboard=false", "data.max_bytes=100000", "model.dtype=bfloat16",
    ]  # fmt: skip
    args = {"source": folders["packed"], "run_dir": str(tmp_path / "run"), "overrides": overrides}
    (said,) = run_workers(f"{WORKERS}:train_from", 1, args)
    (told,) = (line for line in said if line.startswith(f"weights of {folders['packed']}; "))
    assert told.endswith("the multi-token-prediction layer not among them, so at initial values")
    told = export_run(tmp_path / "run", tmp_path / "out", layout=Layout(packed=True), workers=1, limit=10**9)
    assert "the vision tower, which --tower-from DIR would take" in told
    # As numbers: a step of no length makes zeros of either sign the same.
    before = released.unpacked(released.load(Path(folders["packed"])))
    after = released.unpacked(released.load(tmp_path / "out"))
    learnt = {key for key in before if key.endswith("e_score_correction_bias")}
    tower = {key for key in before if key.startswith(("vision_tower", "mm_projector"))}
    kept = before.keys() - learnt - tower
    assert after.keys() == before.keys() - tower
    assert [key for key in kept if not torch.equal(after[key], before[key])] == []
    assert (tmp_path / "out" / "generation_config.json").is_file()
    again = tmp_path / "again"
    tower_from = Path(folders["packed"])
    told = export_run(
        tmp_path / "run", again, layout=Layout(packed=True), workers=1, limit=10**9, tower_from=tower_from
    )
    assert "left out: the multi-token-prediction layer" in told and "tower" not in told
    whole = released.load(again)
    assert whole.keys() == released.load(tower_from).keys()
    assert [key for key in tower if not torch.equal(whole[key], before[key])] == []
    assert json.loads((again / "config.json").read_text())["vision_config"] == released.VISION

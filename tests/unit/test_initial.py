"""A run takes the shape of the weights it starts from, and refuses weights of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from k3train.config_file import to_yaml
from k3train.errors import UserError
from k3train.initial import follow
from k3train.validate import validate
from launch.compose import compose, resolve_layout
from tests.unit.checkpoint.huggingface import released

TEXT = ("recipe=tiny", "parallel=single", "vision=none")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "released"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(released.tree()))
    return folder


def test_the_model_takes_the_shape_and_keeps_what_training_alone_needs(source: Path) -> None:
    config = compose([*TEXT, f"init_from={source}", "model.mtp_loss_weight=0.3"])
    model = config.model
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.top_k) == (5, 64, 320, 2)
    assert (model.mtp_layers, model.mtp_loss_weight, model.dtype) == (1, 0.3, "float32")
    assert not config.vision.enabled


def test_a_tower_is_shaped_where_the_run_has_one(source: Path) -> None:
    config = compose(["recipe=tiny", "parallel=single", "vision=tiny", f"init_from={source}"])
    assert (config.vision.hidden_size, config.vision.head_dim, config.vision.max_patches) == (64, 32, 1024)
    config = compose(["recipe=tiny", "parallel=single", f"init_from={source}"])
    assert (config.vision.hidden_size, config.vision.head_dim, config.vision.max_patches) == (32, 24, 1024)


def test_a_run_is_a_source_too(tmp_path: Path) -> None:
    other = compose([*TEXT, "model.num_layers=5", "model.vocab_size=512"])
    (tmp_path / "config.yaml").write_text(to_yaml(other))
    config = compose([*TEXT, f"init_from={tmp_path}", "run.dir=elsewhere"])
    assert (config.model.num_layers, config.model.vocab_size) == (5, 512)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.top_k=4", r"model\.top_k=4: the weights of init_from=.*released have 2"),
        ("model.vocab_size=512", r"model\.vocab_size=512: the weights of init_from=.*released have 320"),
        ("model=tiny", r"model\.num_layers=9: the weights of init_from=.*released have 5"),
    ],
)
def test_other_shapes_that_were_asked_for_are_refused(
    override: str, message: str, source: Path, tmp_path: Path
) -> None:
    config = compose([*TEXT, f"init_from={source}", override, f"run.dir={tmp_path}/run", "run.device=cpu"])
    with pytest.raises(UserError, match=message):
        validate(resolve_layout(config, 1), 1)


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"init_from=.*: has neither the config\.json of a Hugging Face folder"
    ):
        compose([*TEXT, f"init_from={tmp_path}"])


def test_a_run_cannot_start_from_itself(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(compose([*TEXT, "model.num_layers=5"])))
    config = compose([*TEXT, f"init_from={tmp_path}", f"run.dir={tmp_path}"])
    with pytest.raises(UserError, match=r"init_from=.*: is run\.dir itself"):
        validate(resolve_layout(config, 1), 1)


def test_a_run_that_goes_on_needs_the_folder_no_more(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun = compose([*TEXT, f"init_from={source}", f"run.dir={run}"])
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(resolve_layout(begun, 1)))
    shutil.rmtree(source)
    config = compose([*TEXT, f"init_from={source}", f"run.dir={run}"])
    assert config.model.num_layers == 5
    validate(resolve_layout(config, 1), 1)
    with pytest.raises(UserError, match="has neither"):
        compose([*TEXT, f"init_from={source}", f"run.dir={tmp_path}/new"])
    assert follow(compose(TEXT), ()).model.num_layers == 9

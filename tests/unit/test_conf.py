from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import conf
from k3train.config import Config
from k3train.config_file import load_yaml, to_yaml
from k3train.errors import UserError
from launch.compose import compose, ready
from launch.groups import POLICIES, groups, policies, summary

CONF = Path(conf.__file__).parent
FILES = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml") if path.parent.name != POLICIES)
# What a choice needs beside it to make a whole configuration.
NEEDS = {
    "parallel/pp8_vpp2_ep128": ["model=k3", "run.microbatches=8", "eval.batches=1024"],
    "model/tiny_dense": ["parallel=single"],
    "model/slice": ["parallel=single"],
    "data/indexed": ["data.train=[a]"],
    "data/needles": ["vision=none"],
}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_shipped_file_composes_and_validates(path: Path) -> None:
    group, option = path.parent.name, path.stem
    overrides = [f"{group}={option}", *NEEDS.get(f"{group}/{option}", [])]
    config = ready(overrides, inputs=False)
    given = yaml.safe_load((CONF / path).read_text())
    recipe = yaml.safe_load((CONF / "recipe/tiny.yaml").read_text()).get(group, {})
    section = getattr(config, group) if group != "recipe" else config
    for key, value in given.items():
        if key not in ("defaults", *recipe) and not isinstance(value, dict):
            assert getattr(section, key) == value, f"{path} sets {key}, and something else overrode it"


@pytest.mark.parametrize("recipe", ["tiny", "k3_pretrain"])
@pytest.mark.parametrize("name", policies())
def test_every_shipped_policy_holds_in_every_model(name: str, recipe: str) -> None:
    given = yaml.safe_load((CONF / POLICIES / f"{name}.yaml").read_text())
    assert summary(POLICIES, name)
    overrides = [f"recipe={recipe}", f"offload.policy={name}", "offload.nvme_dir=scratch"]
    if (recipe, name) == ("k3_pretrain", "peer"):
        with pytest.raises(UserError, match="early and late pipeline ranks are on different nodes"):
            ready(overrides, inputs=False)
        return
    resolved = ready(overrides, inputs=False).offload.resolved
    assert {pattern: resolved[pattern] for pattern in given} == given
    assert resolved.keys() - given.keys() <= {"vit.layer"}


@pytest.mark.parametrize("recipe", groups()["recipe"])
@pytest.mark.parametrize(
    "override", ["optim=muon", "optim=adamw", "log=wandb", "parallel=single", "cluster=gb200"]
)
def test_recipes_take_other_groups(recipe: str, override: str) -> None:
    if recipe == "k3_pretrain" and override == "parallel=single":
        pytest.skip("1,024 ranks have no single-rank layout of their own")
    group, _, option = override.partition("=")
    # Four GPUs a node instead of eight: the layout needs as many ranks as before.
    nodes = ["cluster.nodes=256"] if (recipe, override) == ("k3_pretrain", "cluster=gb200") else []
    assert ready([f"recipe={recipe}", override, *nodes], inputs=False).recipe == recipe
    chosen = getattr(compose([f"recipe={recipe}", override]), group)
    for key, value in yaml.safe_load((CONF / group / f"{option}.yaml").read_text()).items():
        nested = isinstance(value, dict)
        for name, leaf in value.items() if nested else [(key, value)]:
            assert getattr(getattr(chosen, key) if nested else chosen, name) == leaf


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_a_configuration_survives_its_file(recipe: str, tmp_path: Path) -> None:
    config = ready([f"recipe={recipe}", "run.name='x: #1'", "cluster.environment.A=1"], inputs=False)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_yaml(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [", "not YAML"),
        ("3", "expected a mapping, found int"),
        ("run: {stepz: 3}", "unknown key run.stepz"),
        ("run: {steps: many}", "run.steps='many': expected int"),
        ("optim: {lr: true}", "optim.lr=True: expected float"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        load_yaml(tmp_path / "config.yaml")


def test_numbers_written_by_hand_are_read_as_their_type(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("optim: {lr: 1e-3, eps: 1}\n")
    optim = load_yaml(tmp_path / "config.yaml").optim
    assert (optim.lr, optim.eps, type(optim.eps)) == (1e-3, 1.0, float)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml: No such file"):
        load_yaml(tmp_path / "config.yaml")


def test_every_file_says_what_it_is_for() -> None:
    obvious = {"checkpoint/default", "log/default", "log/quiet", "optim/adamw"}
    silent = {
        f"{group}/{option}"
        for group, options in groups().items()
        for option in options
        if not summary(group, option)
    }
    assert silent - {f"parallel/{option}" for option in groups()["parallel"]} <= obvious


def test_k3_is_the_published_shape() -> None:
    config: Config = ready(["recipe=k3_pretrain"], inputs=False)
    cut = config.parallel.layers_per_chunk
    assert cut is not None and sum(cut) == config.model.num_layers == 93
    assert [sum(cut[rank::8]) for rank in range(8)] == [12] * 7 + [9]
    assert config.model.num_experts // config.parallel.expert.size == 7
    assert (config.model.num_experts, config.model.top_k, config.model.vocab_size) == (896, 16, 163840)

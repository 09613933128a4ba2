"""The front door of runs in stages: one configuration for each, all of them refused or accepted at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from k3train.config import Config
from k3train.config_file import load_yaml, to_yaml
from k3train.curriculum import Stage
from k3train.errors import UserError
from launch import plan
from launch.compose import _stage_overrides, compose, ready, ready_stages
from launch.finished import is_finished, last_checkpoint
from launch.overrides import parse

TINY = ("recipe=long_context_tiny",)


def names(found: list[Config]) -> list[str | None]:
    return [config.curriculum.stage for config in found]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def done(run_dir: Path, step: int) -> None:
    """A folder that has a checkpoint of a step, as far as a glance at it tells."""
    (run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def saved(run_dir: Path, step: int, stage: str, first: int) -> None:
    """The same with what the manifest says of the stage."""
    done(run_dir, step)
    content = {"extra": {"step": step, "stage": stage, "stage_first": first}}
    (run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text(json.dumps(content))


def test_stages_differ_in_what_they_set_and_share_the_rest(run_dir: Path) -> None:
    a, b, c = ready_stages([*TINY, f"run.dir={run_dir}", "optim.lr=1e-3"])
    assert names([a, b, c]) == ["at_64", "at_256", "at_512"]
    assert [config.data.sequence_length for config in (a, b, c)] == [64, 256, 512]
    assert [config.data.long_documents.times for config in (a, b, c)] == [1, 2, 4]
    layouts = [
        (s.parallel.pipeline, s.parallel.virtual, s.parallel.context, s.parallel.data) for s in (a, b, c)
    ]
    assert layouts == [(1, 1, 1, 2), (2, 2, 1, 1), (1, 1, 2, 1)]
    assert {config.run.steps for config in (a, b, c)} == {9}
    assert {config.optim.lr for config in (a, b, c)} == {1e-3}
    assert {config.cluster.ranks_per_node for config in (a, b, c)} == {2}
    assert ready([*TINY, f"run.dir={run_dir}"]).curriculum.stage == "at_64"


def test_the_long_recipe_walks_to_a_million_tokens_with_as_many_tokens_a_step() -> None:
    found = ready_stages(["recipe=long_context"], inputs=False)
    lengths = [config.data.sequence_length for config in found]
    assert lengths == [2**13, 2**16, 2**18, 2**20]
    assert [config.parallel.context for config in found] == [1, 2, 4, 8]
    for config in found:
        assert config.parallel.data is not None
        samples = config.data.micro_batch_size * config.run.microbatches * config.parallel.data
        assert samples * config.data.sequence_length == 2**20
        assert config.parallel.context * config.parallel.data == 8


def test_one_key_of_one_stage_can_be_set_from_the_command_line(run_dir: Path) -> None:
    more = ("curriculum.stages.at_256.data.sequence_length=128", "curriculum.stages.at_64.steps=7")
    a, b, _ = ready_stages([*TINY, f"run.dir={run_dir}", *more])
    assert (b.data.sequence_length, a.run.steps) == (128, 12)
    whole = "curriculum.stages={only: {steps: 2, data: {sequence_length: 32}}}"
    found = ready_stages(["recipe=tiny_dense_check", f"run.dir={run_dir}", whole])
    assert names(found) == ["only"] and found[0].data.sequence_length == 32


def test_what_is_behind_is_not_run_again_and_need_not_fit(run_dir: Path) -> None:
    more = (*TINY, f"run.dir={run_dir}")
    assert names(ready_stages([*more, "curriculum.stop_behind=at_256"])) == ["at_64", "at_256"]
    done(run_dir, 4)
    assert names(ready_stages(more)) == ["at_256", "at_512"]
    assert names(ready_stages(more, from_start=True)) == ["at_64", "at_256", "at_512"]
    done(run_dir, 7)
    # Two ranks were enough for what is done; the last stage may want four.
    (last,) = ready_stages([*more, "curriculum.stages.at_512.parallel.context=4"])
    assert (last.curriculum.stage, last.cluster.ranks_per_node, last.parallel.data) == ("at_512", 4, 1)
    done(run_dir, 9)
    assert names(ready_stages(more)) == ["at_512"]


def test_all_stages_set_the_number_of_ranks_also_those_that_are_behind_or_not_wanted(run_dir: Path) -> None:
    stages = "{a: {steps: 1, parallel: {data: 2}}, b: {steps: 2, data: {sequence_length: 64}}}"
    more = ("recipe=tiny_dense_check", f"run.dir={run_dir}", f"curriculum.stages={stages}")
    layouts = [(c.curriculum.stage, c.cluster.ranks_per_node, c.parallel.data) for c in ready_stages(more)]
    assert layouts == [("a", 2, 2), ("b", 2, 2)]
    for step in (1, 2):
        done(run_dir, step)
        (b,) = ready_stages(more)
        assert (b.curriculum.stage, b.cluster.ranks_per_node, b.parallel.data) == ("b", 2, 2)
    # Ranks that are named are taken, so another number may take over at a border.
    (b,) = ready_stages([*more, "cluster.ranks_per_node=1"])
    assert (b.cluster.ranks_per_node, b.parallel.data) == (1, 1)
    found = ready_stages(["recipe=long_context", "curriculum.stop_behind=at_256k"], inputs=False)
    assert [(c.cluster.ranks_per_node, c.parallel.data) for c in found] == [(8, 8), (8, 4), (8, 2)]


@pytest.mark.parametrize("policy", ["{layer: recompute}", "{kda.*: recompute, mla.key: keep}"])
def test_a_stage_may_set_a_mapping(policy: str, run_dir: Path) -> None:
    a, _, _ = ready_stages([*TINY, f"run.dir={run_dir}", f"curriculum.stages.at_64.offload.sites={policy}"])
    assert a.offload.sites == yaml.safe_load(policy)


def test_every_value_of_a_stage_comes_through_hydra_s_grammar() -> None:
    changes = {
        "data.train": ["a b", "it's \\ \"x\"", "é{}"], "offload.sites": {"a.*[0]": "x, y", "b:c": "z"},
        "eval.every": 3, "optim.lr": 1e-05, "data.train_weights": None, "offload.adapt": True,
    }  # fmt: skip
    written = _stage_overrides(Stage('it\'s "b"', 1, 0, 3, changes), 7)
    values = {override.key_or_group: override.value() for override in parse(written)}
    assert values == {**changes, "run.steps": 7, "curriculum.stage": 'it\'s "b"'}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "curriculum.stages.at_64.steps=3",
            "the checkpoint of step 5 is of stage at_256, which began behind",
        ),
        (
            "curriculum.stages.at_64.steps=6",
            "the checkpoint of step 5 is of stage at_256, which began behind",
        ),
        (
            "curriculum.stop_behind=at_64",
            "curriculum.stop_behind=at_64: it ends behind step 4, and the run in",
        ),
    ],
)
def test_what_is_behind_stays_as_it_was(override: str, message: str, run_dir: Path) -> None:
    saved(run_dir, 5, "at_256", 4)
    more = (*TINY, f"run.dir={run_dir}")
    assert names(ready_stages(more)) == ["at_256", "at_512"]
    with pytest.raises(UserError) as refused:
        ready_stages([*more, override])
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_steps_of_a_stage_cannot_end_before_what_it_has_done(run_dir: Path) -> None:
    saved(run_dir, 4, "at_64", 0)
    more = (*TINY, f"run.dir={run_dir}")
    assert names(ready_stages([*more, "curriculum.stages.at_64.steps=6"])) == ["at_64", "at_256", "at_512"]
    assert names(ready_stages([*more, "curriculum.stop_behind=at_64"])) == ["at_64"]
    with pytest.raises(UserError) as refused:
        ready_stages([*more, "curriculum.stages.at_64.steps=3"])
    assert str(refused.value) == (
        "the checkpoint of step 4 is of stage at_64, which would now end behind step 3; "
        "set curriculum.stages.at_64.steps to at least 4"
    )


def test_a_checkpoint_before_the_newest_gives_its_own_stage(run_dir: Path) -> None:
    saved(run_dir, 4, "at_64", 0)
    assert names(ready_stages([*TINY, f"run.dir={run_dir}"], done=3)) == ["at_64", "at_256", "at_512"]


@pytest.mark.parametrize(
    ("more", "steps", "finished"),
    [((), 7, False), ((), 9, True), (("curriculum.stop_behind=at_256",), 7, True)],
)
def test_a_run_in_stages_is_finished_behind_the_last_that_is_wanted(
    more: tuple[str, ...], steps: int, finished: bool, run_dir: Path
) -> None:
    done(run_dir, steps)
    overrides = [*TINY, f"run.dir={run_dir}", *more]
    assert is_finished(compose(overrides)) is finished
    assert last_checkpoint(ready(overrides)) == last_checkpoint(compose(overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=3", "run.steps=3: a run in stages takes their steps; set curriculum.stages.NAME.steps"),
        (
            "data.sequence_length=8",
            "data.sequence_length=8: every stage sets it; set curriculum.stages.NAME.data.sequence_length",
        ),
        ("curriculum.stage=at_64", "curriculum.stage=at_64: follows from the step; leave it out"),
        ("curriculum.stop_behind=at_1", "curriculum.stop_behind=at_1: no such stage; valid are at_64"),
        ("curriculum.stages.at_64.steps=0", "curriculum.stages.at_64.steps=0: an integer of at least 1"),
        ("curriculum.stages.new.data.sequence_length=8", "curriculum.stages.new.steps=null: an integer"),
        (
            "curriculum.stages.at_64.data.sequence_length=long",
            'stage at_64: data.sequence_length="long": expected an integer',
        ),
        ("curriculum.stages.at_512.data.sequence_length=511", "stage at_512: parallel.context=2: "),
        ("curriculum.stages.at_256.parallel.pipeline=3", "stage at_64: parallel.data=2: "),
        (
            "curriculum.stages.at_256.data.long_documents.at_least=null",
            "stage at_256: data.long_documents.times",
        ),
        ("curriculum.stages=[a]", "curriculum.stages=[a]: expected a mapping from strings to anything"),
        (
            "curriculum.stages.at_64.model.num_layers=3",
            "curriculum.stages.at_64.model.num_layers=3: the same in",
        ),
    ],
)
def test_refused_in_one_line_before_anything_starts(override: str, message: str, run_dir: Path) -> None:
    with pytest.raises(UserError) as refused:
        ready_stages([*TINY, f"run.dir={run_dir}", override])
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_a_started_run_keeps_its_keys_but_for_those_of_stages(run_dir: Path) -> None:
    more = (*TINY, f"run.dir={run_dir}")
    first, second, _ = ready_stages(more)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(to_yaml(first))
    assert load_yaml(run_dir / "config.yaml") == first
    done(run_dir, 4)
    assert ready(more) == second
    with pytest.raises(UserError, match=r"^stage at_256: model\.top_k=3: the run in .* has 4"):
        ready([*more, "model.top_k=3"])
    (run_dir / "config.yaml").write_text(to_yaml(second))
    with pytest.raises(UserError, match=r"^stage at_256: data\.sequence_length=128: the run in .* has 256"):
        ready([*more, "curriculum.stages.at_256.data.sequence_length=128"])


def test_the_plan_has_a_line_for_each_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert plan.main([*TINY, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["stage"] for row in rows] == ["at_64", "at_256", "at_512"]
    assert [row["tokens"] for row in rows] == [4 * 4 * 64, 3 * 2 * 256, 2 * 2 * 512]
    assert [row["plan"]["tokens_per_step"] for row in rows] == [256, 512, 1024]
    assert [row["plan"]["layout"]["context"] for row in rows] == [1, 1, 2]
    assert plan.main([*TINY, "stage=at_256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows[1]["plan"]
    assert plan.main(["recipe=long_context", "cluster.memory_gib=100"]) == 0
    shown = capsys.readouterr().out
    # No figure is cut, and the mark of what does not fit stands behind its own.
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    for text in ("1301-1400", "1,048,576", "1.05B", "on 8 ranks", "1,520,435,200", "138.42 !"):
        assert text in shown
    for arguments, message in (
        ([*TINY, "stage=at"], "stage=at: no such stage; valid are at_64, at_256, at_512"),
        (["recipe=tiny_dense_check", "stage=at"], "stage=at: no such stage; valid are none"),
        ([*TINY, "costs=uniform"], "costs=: of one stage; add stage=NAME"),
    ):
        with pytest.raises(UserError) as refused:
            plan.main(arguments)
        assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.long_documents.times=2"], "data.long_documents.times=2: needs data.long_documents.at_least"),
        (["data.long_documents.at_least=0"], "data.long_documents.at_least=0: must be at least 1"),
        (["recipe=sft", "data.long_documents.at_least=9"], "only text is up-sampled"),
    ],
)
def test_refusals_of_up_sampling(overrides: list[str], message: str, run_dir: Path) -> None:
    with pytest.raises(UserError) as refused:
        ready(["recipe=tiny_dense_check", f"run.dir={run_dir}", *overrides])
    assert message in str(refused.value)

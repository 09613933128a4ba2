"""Stages of a run: what they may change, which steps are whose, and what stands at a border."""

from __future__ import annotations

from typing import Any

import pytest

from k3train.config import Config, CurriculumConfig
from k3train.curriculum import (
    CHANGEABLE,
    STAGE_SALT,
    at_step,
    data_salt,
    is_border,
    may_change,
    place,
    row,
    shrinking,
    stage_of,
    stages,
    to_run,
)
from k3train.curriculum_view import steps_of
from k3train.errors import UserError
from launch.schema import keys

THREE: dict[str, Any] = {
    "a": {"steps": 10, "data": {"sequence_length": 64}},
    "b": {"steps": 5, "data": {"sequence_length": 256, "long_documents": {"times": 2}}},
    "c": {"steps": 1, "offload": {"sites": {"kda.*": "recompute"}}},
}


def config(stage: str | None = None, curriculum: dict[str, Any] | None = None) -> Config:
    made = Config()
    made.run.steps = 16
    made.curriculum = CurriculumConfig(stages=THREE if curriculum is None else curriculum, stage=stage)
    made.parallel.data = 1
    return made


def test_steps_of_stages_follow_each_other_and_changes_are_dotted() -> None:
    a, b, c = stages(CurriculumConfig(THREE))
    assert [(s.name, s.index, s.first, s.last) for s in (a, b, c)] == [
        ("a", 0, 0, 10), ("b", 1, 10, 15), ("c", 2, 15, 16),
    ]  # fmt: skip
    assert a.changes == {"data.sequence_length": 64}
    assert b.changes == {"data.sequence_length": 256, "data.long_documents.times": 2}
    assert c.changes == {"offload.sites": {"kda.*": "recompute"}}
    assert [at_step((a, b, c), done).name for done in (0, 9, 10, 14, 15, 16, 99)] == list("aabbccc")


def test_what_is_left_to_run() -> None:
    found = stages(CurriculumConfig(THREE))
    assert [s.name for s in to_run(found, 0, None)] == ["a", "b", "c"]
    assert [s.name for s in to_run(found, 10, None)] == ["b", "c"]
    assert [s.name for s in to_run(found, 3, "b")] == ["a", "b"]
    assert [s.name for s in to_run(found, 15, "b")] == ["b"]
    assert [s.name for s in to_run(found, 16, None)] == ["c"]


def test_every_changeable_key_is_a_key() -> None:
    assert set(CHANGEABLE) <= keys().keys()
    assert may_change("offload.policy") and may_change("data.long_documents.times")
    assert not may_change("model.hidden_size") and not may_change("offload") and not may_change("data.path")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "curriculum.stages.x=3: write its steps and keys, as {steps: 100, data: {...}}"),
        ({}, "curriculum.stages.x.steps=null: an integer of at least 1"),
        ({"steps": 0}, "curriculum.stages.x.steps=0: an integer of at least 1"),
        ({"steps": True}, "curriculum.stages.x.steps=True: an integer of at least 1"),
        (
            {"steps": 1, "data": {"sequence_lenght": 2}},
            "curriculum.stages.x.data.sequence_lenght: no such key; did you mean data.sequence_length?",
        ),
        ({"steps": 1, "model": 3}, "curriculum.stages.x.model: no such key"),
    ],
)
def test_refusals(entry: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        stages(CurriculumConfig({"x": entry}))
    assert str(refused.value).startswith(message)


def test_keys_of_the_model_are_the_same_in_all_stages() -> None:
    with pytest.raises(
        UserError, match=r"^curriculum\.stages\.x\.model\.hidden_size=8: the same in all stages"
    ):
        stages(CurriculumConfig({"x": {"steps": 1, "model": {"hidden_size": 8}}}))
    with pytest.raises(UserError, match=r"^curriculum\.stop_behind=z: no such stage; valid are a, b, c$"):
        stages(CurriculumConfig(THREE, stop_behind="z"))
    with pytest.raises(UserError, match=r"none, as curriculum\.stages is empty$"):
        stages(CurriculumConfig(stop_behind="z"))


def test_a_run_without_stages_is_one_with_the_data_s_own_order() -> None:
    plain = config(curriculum={})
    assert (stage_of(plain).first, stage_of(plain).last, data_salt(plain), place(plain)) == (0, 16, 0, {})
    assert data_salt(config("a")) == 0 and data_salt(config("c")) == 2 * STAGE_SALT
    assert place(config("b")) == {"stage": "b", "stage_first": 10}


def test_borders() -> None:
    plain = config(curriculum={})
    assert not is_border(plain, 7, {})
    in_b = {"stage": "b", "stage_first": 10}
    assert not is_border(config("b"), 12, in_b) and not is_border(config("b"), 15, in_b)
    assert is_border(config("c"), 15, in_b)
    assert is_border(config("b"), 10, {"stage": "a", "stage_first": 0})
    # A run that had no stages may be the first one.
    assert is_border(config("b"), 10, {}) and not is_border(config("a"), 7, {})
    for made, step, saved in (
        (config("c"), 12, in_b),
        (config("b"), 12, {"stage": "b", "stage_first": 8}),
        (config("b"), 10, {"stage": "z", "stage_first": 0}),
        (config("c"), 15, {}),
        (plain, 12, in_b),
    ):
        with pytest.raises(UserError, match=f"^the checkpoint of step {step} is of "):
            is_border(made, step, saved)


def test_a_row_counts_tokens_and_names_the_layout() -> None:
    made = config("b")
    made.data.sequence_length, made.data.micro_batch_size, made.run.microbatches = 256, 2, 3
    made.parallel.data, made.parallel.context, made.parallel.expert.size = 4, 2, 8
    made.data.long_documents.at_least, made.data.long_documents.times = 1024, 2
    shown = row(made)
    assert shown == {
        "stage": "b", "steps": "11-15", "sequence_length": 256, "samples_per_step": 24,
        "tokens": 5 * 24 * 256, "ranks": 8, "layout": "CP2 x DP4 x EP8", "long_documents": "2 x from 1,024",
    }  # fmt: skip
    assert steps_of(shown) == 5


def test_shorter_samples_are_told() -> None:
    long, short = config("a"), config("b")
    long.data.sequence_length = 512
    assert shrinking([short, long]) == []
    assert shrinking([long, short]) == ["stage b has samples of 256 tokens, behind 512 in stage a"]

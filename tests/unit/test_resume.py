"""The table of keys that may differ when a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train import curriculum, resume
from k3train.config import Config, flatten
from k3train.errors import UserError

DOCS = Path(__file__).parents[2] / "docs" / "training.md"
KEYS = flatten(Config())


def test_every_entry_of_the_table_is_a_key_and_of_one_kind() -> None:
    assert set(resume.FREE + resume.LAYOUT) <= KEYS.keys()
    assert not [key for key in KEYS if resume.is_free(key) and resume.is_layout(key)]
    for section in resume.FREE_SECTIONS + resume.LAYOUT_SECTIONS:
        assert any(key.startswith(f"{section}.") for key in KEYS), section


@pytest.mark.parametrize(
    "key",
    [
        "model.hidden_size", "model.dtype", "optim.name", "optim.lr", "run.seed", "data.train", "data.source",
        "data.sequence_length", "quant.recipe", "vision.depth", "model.balance_ema",
    ],
)  # fmt: skip
def test_what_is_computed_must_stay(key: str) -> None:
    assert key in KEYS and not resume.is_free(key) and not resume.is_layout(key)


def test_every_key_of_parallel_may_change() -> None:
    stays = [key for key in KEYS if key.startswith("parallel.") and not resume.is_free(key)]
    assert all(resume.is_layout(key) for key in stays)


def test_a_stage_may_set_only_keys_that_are_of_some_kind() -> None:
    """A layout that a stage may choose, a resume may choose too."""
    own = {key for key in curriculum.CHANGEABLE if key.startswith(("parallel.", "run."))}
    assert all(resume.is_layout(key) or resume.is_free(key) for key in own)


def test_changes_are_sorted_into_those_of_the_layout_and_those_that_must_stay() -> None:
    saved = resume.fixed_keys(Config())
    now = {**saved, "parallel.pipeline": 2, "optim.lr": 0.5, "model.backends.kda": "chunk"}
    layout, refused = resume.changes(saved, now)
    assert [str(change) for change in layout] == [
        "model.backends.kda auto -> chunk",
        "parallel.pipeline 1 -> 2",
    ]
    assert [str(change) for change in refused] == ["optim.lr 0.002 -> 0.5"]
    assert resume.changes(saved, now, lambda key: True) == ([], [])
    as_read = {**saved, "parallel.layers_per_chunk": [3, 1]}
    assert not resume.differences(as_read, {**saved, "parallel.layers_per_chunk": (3, 1)})


def test_samples_of_a_step_must_stay() -> None:
    saved = {"data.micro_batch_size": 2, "run.microbatches": 4, "parallel.data": 2}
    resume.refuse_batch("it", saved, {**saved, "run.microbatches": 8, "parallel.data": 1})
    with pytest.raises(UserError, match=r"= 32 samples a step, and it has 16; set run\.microbatches=2, or"):
        resume.refuse_batch("it", saved, {**saved, "parallel.data": 4})
    with pytest.raises(UserError, match="choose factors that give it"):
        resume.refuse_batch("it", saved, {**saved, "parallel.data": 3})
    resume.refuse_batch("an old one", {}, saved)


def test_docs_name_every_key() -> None:
    text = DOCS.read_text().partition("## Resume")[2]
    for name in (*resume.FREE, *resume.LAYOUT, *resume.LAYOUT_SECTIONS, *resume.FREE_SECTIONS):
        assert f"`{name}`" in text, name

"""`k3train eval` with a model of known skill in place of a run's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3train import read_back
from k3train.config import Config, NeedlesConfig
from k3train.config_file import load_yaml, to_yaml
from k3train.data.bundled import bundled_corpus
from k3train.data.long.longmix import longmix
from k3train.data.long.mix import Mixture
from k3train.data.long.score import read
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError

TOKENIZER = ByteTokenizer()
OPEN, MARK = b"<:"
REACH = 400


def lookup(tokens: Tensor, packing: Any) -> Tensor:
    """Logits [b, s, v] of a model that finds codes again within REACH tokens, else repeats the last token."""
    likeliest = tokens.clone()
    for row, out in zip(tokens.tolist(), likeliest, strict=True):
        stated: dict[int, tuple[int, int]] = {}
        for i in range(2, len(row)):
            if row[i] == MARK and row[i - 2] == OPEN:
                place, value = stated.get(row[i - 1], (-REACH, 0))
                if i - place < REACH:
                    out[i] = value
            if row[i - 1] == MARK and row[i - 3] == OPEN:
                stated.setdefault(row[i - 2], (i, row[i]))
    return torch.nn.functional.one_hot(likeliest, TOKENIZER.vocab_size).float()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with that model."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = Config()
    config.data.sequence_length = 160
    config.data.needles = NeedlesConfig(pairs=16, questions=8)
    config.data.cache_dir = str(tmp_path / "cache")
    config.data.max_bytes = 200_000
    (folder / "config.yaml").write_text(to_yaml(config))

    @contextmanager
    def generator(run_dir: str | Path) -> Iterator[Any]:
        yield SimpleNamespace(
            tokenizer=TOKENIZER, model=lookup, groups=SimpleNamespace(device=torch.device("cpu"))
        )

    monkeypatch.setattr(read_back, "generator", generator)
    return folder


def test_needles_are_asked_for_at_up_to_eight_times_the_length_of_a_run(run: Path) -> None:
    table = read_back.find_needles(run, samples=6)
    assert table.groups == ("160", "320", "640", "1,280")
    assert table.asked.sum(1).tolist() == [24] * 4
    assert table.accuracy("160") == table.accuracy("320") == 1
    assert table.by_depth("1,280")[0] == 0 and table.by_depth("1,280")[-1] == 1
    assert str(read(run)) == str(table)
    assert "Codes found in the window" in (run / "report.html").read_text()


def test_lengths_of_stages_are_those_tested(tmp_path: Path) -> None:
    config = Config()
    config.data.sequence_length = 512
    stages = {"a": {"steps": 1, "data": {"sequence_length": 128}}, "b": {"steps": 1}}
    config.curriculum.stages = stages
    assert read_back.tested_lengths(config, tmp_path) == [128, 512]


def test_the_length_of_a_stage_that_states_none_is_read_from_the_metrics(tmp_path: Path) -> None:
    config = Config()
    config.curriculum.stages = {"a": {"steps": 1}, "b": {"steps": 1, "data": {"sequence_length": 256}}}
    config.curriculum.stage, config.data.sequence_length = "b", 256  # as the run leaves its config.yaml
    lines = [{"step": 1, "sequence_length": 64}, {"step": 2, "sequence_length": 256}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_back.tested_lengths(config, tmp_path) == [64, 256]


def test_lengths_without_room_for_the_codes_are_left_out_or_refused(run: Path) -> None:
    config = load_yaml(run / "config.yaml")
    config.curriculum.stages = {
        "a": {"steps": 1, "data": {"sequence_length": 64}},
        "b": {"steps": 1, "data": {"sequence_length": 160}},
    }
    (run / "config.yaml").write_text(to_yaml(config))
    said: list[str] = []
    assert read_back.find_needles(run, samples=1, say=said.append).groups == ("160",)
    assert said == ["left out: length 64, where 16 codes and their questions take 100 tokens"]
    with pytest.raises(UserError, match=r"lengths=64: 16 codes .* take 100 tokens .*; set lengths= to 101"):
        read_back.find_needles(run, [64, 128], 1)
    assert read_back.find_needles(run, [101], 1).groups == ("101",)


def test_tasks_of_a_corpus_are_counted_by_kind(run: Path, tmp_path: Path) -> None:
    corpus, _ = bundled_corpus(TOKENIZER, str(tmp_path / "cache"), 200_000)
    prefix = str(tmp_path / "long")
    mixture = Mixture(1024, ("needle", "continue"), 2, wording="compact")
    longmix([corpus], prefix, mixture, 5, seed=0, workers=1, tokenizer="byte", progress=False)
    table = read_back.answer_tasks(run, prefix)
    assert sorted(table.groups) == ["continue", "needle"]
    assert table.asked.sum() == 10 and table.accuracy("continue") == 0
    assert 0 < table.accuracy("needle") < 1
    assert read_back.answer_tasks(run, prefix, samples=2).asked.sum() == 4
    with pytest.raises(UserError, match=r"tasks.jsonl does not exist; `k3train data longmix` writes it"):
        read_back.answer_tasks(run, corpus)
    Path(f"{prefix}.tasks.jsonl").write_text("")
    with pytest.raises(UserError, match=r"long.tasks.jsonl is empty"):
        read_back.answer_tasks(run, prefix)

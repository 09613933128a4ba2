"""Scoring by depth with predictors of known skill, and the windows that needle runs read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from k3train.config import DataConfig, NeedlesConfig
from k3train.data.indexed import open_corpus
from k3train.data.long.corpus import Corpus, Ids
from k3train.data.long.mix import Mixer
from k3train.data.long.score import FILE, Predict, read, score
from k3train.data.long.windows import NeedleWindows, build_needles, chance, mixture
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError
from k3train.log import needles

TOKENIZER = ByteTokenizer()
PAIRS, QUESTIONS = 16, 4
OPEN, MARK, CLOSE = b"<:>"

MakeCorpus = Callable[[str, Sequence[Sequence[int]]], str]


@pytest.fixture
def corpus(make_corpus: MakeCorpus) -> Corpus:
    random = np.random.RandomState(0)
    documents = [[*random.randint(97, 123, size), TOKENIZER.eod_id] for size in range(50, 1500, 31)]
    return Corpus([open_corpus(make_corpus("source", documents))], TOKENIZER.eod_id)


def mixer(corpus: Corpus, length: int, seed: int = 0) -> Mixer:
    return Mixer(corpus, TOKENIZER, mixture(length, PAIRS, QUESTIONS), seed)


def reader(window: int | None = None) -> Predict:
    """Looks a key up in the last `window` tokens, all of them when None."""

    def predict(tokens: Ids) -> Ids:
        found = np.zeros_like(tokens)
        for row, out in zip(tokens, found, strict=True):
            for i in np.flatnonzero(row == MARK):
                first = 0 if window is None else max(0, i - window)
                for j in range(first, i - 1):
                    if (
                        row[j] == row[i - 1]
                        and row[j - 1] == OPEN
                        and row[j + 1] == MARK
                        and row[j + 3] == CLOSE
                    ):
                        out[i] = row[j + 2]
        return found

    return predict


def guesser(tokens: Ids) -> Ids:
    """Any of the sixteen values."""
    return np.random.RandomState(0).randint(97, 113, tokens.shape)


def test_a_perfect_reader_finds_everything_at_every_depth(corpus: Corpus) -> None:
    groups = [(str(n), map(mixer(corpus, n).__getitem__, range(12)), None) for n in (128, 512)]
    table = score("tokens", groups, reader(), depths=4)
    assert table.groups == ("128", "512") and table.asked.sum(1).tolist() == [48, 48]
    assert [table.accuracy(group) for group in table.groups] == [1.0, 1.0]
    assert table.by_depth("512") == [1.0] * 4


def test_a_guesser_is_right_as_often_as_chance(corpus: Corpus) -> None:
    table = score("tokens", [("256", map(mixer(corpus, 256).__getitem__, range(400)), None)], guesser)
    assert table.accuracy("256") == pytest.approx(1 / 16, abs=0.02)
    assert max(share or 0 for share in table.by_depth("256")) < 0.12


def test_a_short_sighted_reader_fails_at_the_beginning(corpus: Corpus) -> None:
    table = score("tokens", [("1024", map(mixer(corpus, 1024).__getitem__, range(20)), None)], reader(500))
    shares = [share or 0.0 for share in table.by_depth("1024")]
    assert shares[0] == shares[1] == 0 and shares[3] == shares[4] == 1
    assert 0.4 < table.accuracy("1024") < 0.6


def test_chance_counts_what_earlier_questions_rule_out() -> None:
    assert chance(16, 1) == 1 / 16
    assert chance(16, 4) == pytest.approx((1 / 16 + 1 / 15 + 1 / 14 + 1 / 13) / 4)


def test_a_table_survives_its_file_and_is_shown_in_the_report(corpus: Corpus, tmp_path: Path) -> None:
    assert needles.section(tmp_path) == ""
    table = score("tokens", [("256", map(mixer(corpus, 256).__getitem__, range(9)), 0.0625)], reader(100))
    (tmp_path / FILE).write_text(json.dumps(table.record()))
    found = read(tmp_path)
    assert found is not None and str(found) == str(table) and found.chance == (0.0625,)
    shown = needles.section(tmp_path)
    assert "Codes found in the window" in shown and ">6.2%<" in shown and shown.count("<td") == 9
    (tmp_path / FILE).write_text("{")
    assert read(tmp_path) is None


def test_windows_give_answers_as_labels(corpus: Corpus) -> None:
    windows = NeedleWindows(corpus, TOKENIZER, mixture(128, PAIRS, QUESTIONS), seed=0)
    for index in range(5):
        sample = windows[index]
        assert sample["tokens"].shape == sample["labels"].shape == (128,)
        assert np.array_equal(sample["tokens"][1:], sample["labels"][:-1])
        places = sample["answer_positions"]
        assert places.size == QUESTIONS and (sample["tokens"][places] == MARK).all()
        right = reader()(sample["tokens"][None])[0]
        assert np.array_equal(right[places], sample["labels"][places])


def test_held_out_windows_ask_few_and_read_other_files(tmp_path: Path) -> None:
    data = DataConfig(cache_dir=str(tmp_path), max_bytes=60_000, needles=NeedlesConfig(pairs=12, questions=9))
    train, valid = build_needles(data, TOKENIZER, 256, 1, 10, 10)
    assert train[0]["answer_positions"].size == 9 and valid[0]["answer_positions"].size == 4
    assert (
        train[3]["tokens"].tolist() == build_needles(data, TOKENIZER, 256, 1, 99, 1)[0][3]["tokens"].tolist()
    )
    other, _ = build_needles(data, TOKENIZER, 256, 2, 10, 10)
    assert other[3]["tokens"].tolist() != train[3]["tokens"].tolist()


@pytest.mark.parametrize(
    ("pairs", "questions", "length", "message"),
    [
        (4, 5, 256, "data.needles.questions=5: at most pairs=4, each is asked for once"),
        (17, 5, 256, "data.needles.pairs=17: there are 16 different codes"),
        (16, 8, 120, "data.sequence_length=120: the codes and questions of data.needles take 120 tokens"),
    ],
)
def test_codes_that_no_sample_can_hold_are_refused(
    pairs: int, questions: int, length: int, message: str
) -> None:
    data = DataConfig(needles=NeedlesConfig(pairs, questions))
    with pytest.raises(UserError, match=message):
        build_needles(data, TOKENIZER, length, 1, 1, 1)


def test_a_sample_learns_everything_or_its_answers_alone(corpus: Corpus) -> None:
    chosen = mixture(256, PAIRS, QUESTIONS)
    everything = NeedleWindows(corpus, TOKENIZER, chosen, 0)[1]
    answers = NeedleWindows(corpus, TOKENIZER, chosen, 0, answers_only=True)[1]
    assert everything["loss_mask"].all()
    assert np.flatnonzero(answers["loss_mask"]).tolist() == sorted(answers["answer_positions"].tolist())

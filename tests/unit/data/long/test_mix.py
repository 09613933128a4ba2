"""One long sample: its length, where evidence lies, and that questions follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from k3train.data.indexed import open_corpus
from k3train.data.long.corpus import Corpus
from k3train.data.long.mix import LongSample, Mixer, Mixture
from k3train.data.long.tasks import KINDS, PARTS, PASSAGE, Span
from k3train.data.long.wording import WORDINGS, Random, distinct, endless
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError

LENGTH = 4096
MIXTURE = Mixture(LENGTH, KINDS, questions=8, unasked=2)
TOKENIZER = ByteTokenizer()

MakeCorpus = Callable[[str, Sequence[Sequence[int]]], str]


def text_of(random: Random, size: int) -> list[int]:
    """Letters and line ends, then the end token."""
    return [*random.choice([*range(97, 123), 10], size).tolist(), TOKENIZER.eod_id]


@pytest.fixture
def corpus(make_corpus: MakeCorpus) -> Corpus:
    """Documents of 3 to 3000 tokens in two files."""
    random = Random(0)
    files = [[text_of(random, size) for size in range(3, 3000, step)] for step in (97, 131)]
    prefixes = [make_corpus(f"c{number}", documents) for number, documents in enumerate(files)]
    return Corpus([open_corpus(prefix) for prefix in prefixes], TOKENIZER.eod_id)


@pytest.fixture
def samples(corpus: Corpus) -> list[LongSample]:
    mixer = Mixer(corpus, TOKENIZER, MIXTURE, seed=5)
    return [mixer[index] for index in range(40)]


def shown(sample: LongSample, span: Span) -> str:
    return TOKENIZER.decode(sample.ids[span.start : span.stop].tolist())


def test_a_sample_has_the_length_asked_for_and_one_end_token(samples: list[LongSample]) -> None:
    for sample in samples:
        assert sample.ids.shape == (LENGTH,)
        assert np.flatnonzero(sample.ids == TOKENIZER.eod_id).tolist() == [LENGTH - 1]


def test_answers_stand_where_they_are_said_to_and_follow_from_their_evidence(
    samples: list[LongSample],
) -> None:
    for sample in samples:
        for task in sample.tasks:
            assert shown(sample, task.answer) == task.text
            assert task.question < task.answer.start < task.answer.stop < LENGTH
            assert all(span.stop <= task.question for span in task.evidence)
            if task.kind in ("needle", "needles"):
                (stated,) = (shown(sample, span) for span in task.evidence)
                before = shown(sample, Span(task.answer.start - len(stated), task.answer.start))
                key = stated.split(" of ")[1].split(" is ")[0]
                assert stated == f"\nThe code of {key} is{task.text}.\n"
                assert before.endswith(f"\nThe code of {key} is")
            elif task.kind == "source":
                heading, passage = (shown(sample, span) for span in task.evidence)
                assert heading == f"\n# Document{task.text}\n" and len(passage) == PASSAGE
                assert f'"{passage}"' in shown(sample, Span(task.question, task.answer.start))
                between = shown(sample, Span(task.evidence[0].stop, task.evidence[1].stop))
                assert "# Document" not in between


def test_a_document_goes_on_behind_its_other_parts(corpus: Corpus) -> None:
    mixer = Mixer(corpus, TOKENIZER, replace(MIXTURE, kinds=("continue",), questions=2), seed=5)
    texts = ["".join(map(chr, corpus.read(number).tolist())) for number in range(len(corpus))]
    orders = set()
    for sample in (mixer[index] for index in range(10)):
        assert len(sample.tasks) == 2
        for task in sample.tasks:
            parts = [shown(sample, span).split("]\n")[1][:-1] for span in task.evidence]
            assert len(parts) == PARTS - 1
            assert sum("".join([*parts, task.text]) in text for text in texts) == 1
            orders.add(tuple(np.argsort([span.start for span in task.evidence]).tolist()))
    assert len(orders) > 3


def test_evidence_is_spread_evenly_over_depth(corpus: Corpus) -> None:
    for kind in ("needle", "needles", "source"):
        mixer = Mixer(corpus, TOKENIZER, replace(MIXTURE, kinds=(kind,), questions=5), seed=1)
        depths = []
        for tasks in (mixer[index].tasks for index in range(80)):
            first = min(task.question for task in tasks)
            depths += [task.evidence[-1].start / first for task in tasks]
        assert len(depths) >= 380
        shares = np.histogram(depths, 5, (0, 1))[0] / len(depths)
        assert shares.min() > 0.15 and shares.max() < 0.25, (kind, shares)


def test_kinds_take_turns(samples: list[LongSample]) -> None:
    asked = {(i, task.kind, task.question) for i in range(10) for task in samples[i].tasks}
    kinds = Counter(kind for _, kind, _ in asked)
    assert kinds["needle"] == kinds["needles"] == kinds["continue"] == 20
    assert 15 <= kinds["source"] <= 20


def test_a_sample_follows_from_its_number_and_the_seed(corpus: Corpus) -> None:
    first, again, other = (Mixer(corpus, TOKENIZER, MIXTURE, seed) for seed in (3, 3, 4))
    assert np.array_equal(first[7].ids, again[7].ids) and first[7].tasks == again[7].tasks
    assert not np.array_equal(first[7].ids, first[8].ids)
    assert not np.array_equal(first[7].ids, other[7].ids)


def test_whole_documents_are_joined(corpus: Corpus) -> None:
    mixer = Mixer(corpus, TOKENIZER, Mixture(LENGTH, ("needle",), 1), seed=2)
    short = [corpus.read(number).tobytes() for number in range(len(corpus)) if corpus.length(number) > 100]
    whole = sum(text in mixer[index].ids.tobytes() for index in range(5) for text in short)
    assert whole >= 5


def test_too_short_a_sample_is_refused(corpus: Corpus) -> None:
    with pytest.raises(UserError, match="length 300 is too short: the tasks of a sample take"):
        Mixer(corpus, TOKENIZER, Mixture(300, ("needle",), 8), 0)[0]
    with pytest.raises(UserError, match="length 600 is too short"):
        Mixer(corpus, TOKENIZER, Mixture(600, ("source",), 8), 0)[0]


def test_more_codes_than_a_wording_has_are_refused(corpus: Corpus) -> None:
    with pytest.raises(UserError, match="20 codes in a sample; this wording has 16"):
        Mixer(corpus, TOKENIZER, Mixture(LENGTH, ("needle",), 20, wording="compact"), 0)[0]


@pytest.mark.parametrize("name", WORDINGS)
def test_no_key_and_no_value_comes_twice(name: str) -> None:
    pairs = WORDINGS[name].draw(Random(0), 16)
    assert len({key for key, _ in pairs}) == len({value for _, value in pairs}) == 16


def test_numbers_are_distinct_and_endless_ones_repeat_after_all() -> None:
    random = Random(0)
    assert sorted(distinct(random, 10, 10)) == list(range(10))
    assert len(set(distinct(random, 10, 1000))) == 10
    numbers = list(islice(endless(random, 7), 21))
    assert [sorted(numbers[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3


def test_no_documents_are_refused() -> None:
    with pytest.raises(UserError, match="no documents to join"):
        Corpus([], TOKENIZER.eod_id)

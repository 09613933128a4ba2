"""Samples of needles in the bundled corpus, made as they are read: codes stated, and asked for at the end.

Letters: s tokens of a sample, a tokens of its answers.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...errors import UserError
from ..bundled import bundled_corpus
from ..datasets import TRAIN_SALT, VALID_SALT, Samples
from ..indexed import open_corpus
from ..packed import Sample
from ..tokenizer import Tokenizer
from .corpus import Corpus
from .mix import LongSample, Mixer, Mixture
from .tasks import Author
from .wording import WORDINGS, Random

WORDING = "compact"
MOST_PAIRS = WORDINGS[WORDING].most
TESTED = 4
"""Most questions of a sample to test with: few, so that what was asked before rules out little."""


class PairKeys(Protocol):
    """The keys of `data.needles`."""

    pairs: int
    questions: int
    answers_only: bool


class NeedleKeys(Protocol):
    """The keys of the `data` section that are read here."""

    @property
    def needles(self) -> PairKeys: ...

    cache_dir: str | None
    max_bytes: int | None


class NeedleWindows:
    """Sample `i`: s inputs and s labels, a pure function of `i`, the corpus and the seed."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        mixture: Mixture,
        seed: int,
        *,
        answers_only: bool = False,
    ) -> None:
        """`mixture.length` is s + 1."""
        self.mixer = Mixer(corpus, tokenizer, mixture, seed)
        self.answers_only = answers_only

    def __getitem__(self, index: int) -> Sample:
        """tokens, labels [s] int64, loss_mask [s] float32, answer_positions [a] int64, sample_id."""
        return as_sample(self.mixer[index], index, answers_only=self.answers_only)


def build_needles(
    data: NeedleKeys,
    tokenizer: Tokenizer,
    sequence_length: int,
    seed: int,
    num_train_samples: int,
    num_valid_samples: int,
) -> tuple[Samples, Samples]:
    """Training and validation samples; the latter of held-out files, with as many questions as tests ask.

    Raises:
        UserError: see `check_needles`.
    """
    check_needles(data, tokenizer, sequence_length)
    corpora = [
        Corpus([open_corpus(prefix)], tokenizer.eod_id)
        for prefix in bundled_corpus(tokenizer, data.cache_dir, data.max_bytes)
    ]
    needles, learnt = data.needles, data.needles.answers_only
    train_mixture = mixture(sequence_length, needles.pairs, needles.questions)
    tested = mixture(sequence_length, needles.pairs, min(needles.questions, TESTED))
    train = NeedleWindows(corpora[0], tokenizer, train_mixture, seed + TRAIN_SALT, answers_only=learnt)
    valid = NeedleWindows(corpora[1], tokenizer, tested, seed + VALID_SALT, answers_only=learnt)
    return Samples(train, num_train_samples), Samples(valid, num_valid_samples)


def check_needles(data: NeedleKeys, tokenizer: Tokenizer, sequence_length: int) -> None:
    """Refuse what no sample can hold, without reading any text.

    Raises:
        UserError: more questions than codes, more codes than there are, or no room for them.
    """
    pairs, questions = data.needles.pairs, data.needles.questions
    if questions > pairs:
        raise UserError(f"data.needles.questions={questions}: at most pairs={pairs}, each is asked for once")
    if pairs > MOST_PAIRS:
        raise UserError(f"data.needles.pairs={pairs}: there are {MOST_PAIRS} different codes")
    taken = codes_size(tokenizer, pairs, questions)
    if taken >= sequence_length:
        raise UserError(
            f"data.sequence_length={sequence_length}: the codes and questions of data.needles take "
            f"{taken} tokens; take longer samples or fewer of them"
        )


def codes_size(tokenizer: Tokenizer, pairs: int, questions: int) -> int:
    """Tokens of the codes and questions of a sample, whose inputs must be more than that."""
    author = Author(tokenizer, WORDINGS[WORDING], Random(0))
    author.ask_codes(questions, 0, pairs - questions)
    return author.size


def mixture(sequence_length: int, pairs: int, questions: int) -> Mixture:
    """What a sample of s inputs is made of."""
    return Mixture(sequence_length + 1, ("needle",), questions, pairs - questions, WORDING)


def chance(pairs: int, questions: int) -> float:
    """Accuracy of who reads all codes of a sample but not their keys, and never answers one twice."""
    return sum(1 / (pairs - asked) for asked in range(questions)) / questions


def as_sample(long: LongSample, index: int, *, answers_only: bool = False) -> Sample:
    """A long sample as training reads it; at `answer_positions` the label is a token of an answer."""
    answers = [np.arange(*task.answer) for task in long.tasks]
    places = np.concatenate([np.empty(0, np.int64), *answers]) - 1
    loss_mask = np.zeros(long.ids.size - 1, np.float32)
    loss_mask[places if answers_only else slice(None)] = 1
    return {
        "tokens": long.ids[:-1],
        "labels": long.ids[1:],
        "loss_mask": loss_mask,
        "answer_positions": places,
        "sample_id": index,
    }

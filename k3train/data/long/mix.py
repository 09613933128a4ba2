"""One long sample: documents joined in random order, plants among them, questions behind them, an end token.

Evidence is spread evenly over depth: as many stretches of equal length as there are plants, one plant at a
random place of each, and which plant gets which stretch is drawn. Letters: p plants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import UserError
from ..tokenizer import Tokenizer
from .corpus import Corpus, Ids
from .tasks import GROUP, PASSAGE, TRIES, Author, Joined, Question, Span, Task, join_documents
from .wording import NAMES, WORDINGS, Random, endless, name


@dataclass(frozen=True)
class Mixture:
    """What samples are made of."""

    length: int
    """Tokens of a sample, end token included."""
    kinds: tuple[str, ...]
    """Tasks that its questions take turns in; see `tasks`."""
    questions: int
    unasked: int = 0
    """Codes that are stated and not asked for."""
    wording: str = "sentence"

    def asked(self, first: int) -> Counter[str]:
        """Questions of each kind where they begin with kind number `first`."""
        return Counter(self.kinds[(first + i) % len(self.kinds)] for i in range(self.questions))

    def check_codes(self, tokenizer: Tokenizer) -> None:
        """Refuse codes that no sample can hold, without reading any text.

        Raises:
            UserError: more codes than the wording has, or no room for them.
        """
        wording, turns = WORDINGS[self.wording], [self.asked(first) for first in range(len(self.kinds))]
        codes = max(asked["needle"] + GROUP * asked["needles"] for asked in turns) + self.unasked
        if codes > wording.most:
            raise UserError(
                f"questions={self.questions}, unasked={self.unasked}: up to {codes} codes in a sample, and "
                f"wording={self.wording} has {wording.most}; lower --unasked or --questions"
            )
        for asked in turns:
            author = Author(tokenizer, wording, Random(0))
            author.ask_codes(asked["needle"], asked["needles"], self.unasked)
            if author.size > self.length - 2:  # a token of a document and the end token
                raise self.too_short(author.size)

    def too_short(self, taken: int) -> UserError:
        """Says that its tasks take as many tokens."""
        return UserError(
            f"length {self.length} is too short: the tasks of a sample take {taken} tokens "
            "and leave none for documents; take longer samples or fewer questions"
        )


@dataclass(frozen=True)
class LongSample:
    """A sample and what it asks."""

    ids: Ids
    tasks: tuple[Task, ...]


class Mixer:
    """Sample `i`: a pure function of `i`, the corpus, the mixture and the seed."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, mixture: Mixture, seed: int) -> None:
        self.corpus, self.tokenizer, self.mixture, self.seed = corpus, tokenizer, mixture, seed

    def __getitem__(self, index: int) -> LongSample:
        """Exactly `mixture.length` tokens.

        Raises:
            UserError: the tasks leave no room for documents, or ask for more codes than there are.
        """
        words = [part for number in (self.seed, index) for part in (number & 0xFFFFFFFF, number >> 32)]
        # RandomState's streams are frozen by NumPy's policy; those of Generator may change.
        random = Random(words)
        author = Author(self.tokenizer, WORDINGS[self.mixture.wording], random)
        documents, names = endless(random, len(self.corpus)), endless(random, NAMES)
        sources = self._write(author, documents, names)
        rest = self.mixture.length - 1 - author.size
        if rest < 1:
            raise self.mixture.too_short(author.size)
        joined = join_documents(author, self.corpus, documents, names, rest, sources > 0)
        room = rest - sources * _source_size(author, joined)
        if room < 1:
            raise self.mixture.too_short(self.mixture.length - 1 - room)
        places = _places(random, author, joined, room)
        _ask_sources(random, author, joined, room, places, sources)
        size = self.mixture.length - 1 - author.size
        return _assemble(author, joined.ids[:size], places, self.tokenizer.eod_id)

    def _write(self, author: Author, documents: Iterator[int], names: Iterator[int]) -> int:
        """Write what needs no documents around it; the number of `source` questions, which do."""
        asked = self.mixture.asked(int(author.random.randint(len(self.mixture.kinds))))
        author.ask_codes(asked["needle"], asked["needles"], self.mixture.unasked)
        for _ in range(asked["continue"]):
            author.ask_continuation(self.corpus, documents, name(next(names)), self.mixture.length)
        return asked["source"]


def _source_size(author: Author, joined: Joined) -> int:
    """Most tokens of a `source` question."""
    blank = np.empty(0, np.int64)
    return PASSAGE + max(author.ask_source(blank, label, ()).size for label in joined.names)


def _places(random: Random, author: Author, joined: Joined, room: int) -> list[int]:
    """Where each plant goes in the joined documents [p]."""
    count = len(author.plants)
    drawn = (random.permutation(count) + random.random_sample(count)) / max(count, 1) * room
    return [min(joined.outside_headings(int(place)), room) for place in drawn]


def _ask_sources(
    random: Random, author: Author, joined: Joined, room: int, places: list[int], count: int
) -> None:
    """Quote passages from `count` stretches; none where there is but one document to choose."""
    if sum(stop <= room for stop in joined.stops) < 1 or len(joined.stops) < 2:
        return
    for stretch in random.permutation(count):
        for share in ((stretch + random.random_sample(TRIES)) / count).tolist():
            start = int(share * max(room - PASSAGE, 0))
            stop = start + PASSAGE
            which = joined.passage(start, PASSAGE)
            if which is not None and not any(start < place < stop for place in places):
                spans = (joined.headings[which], Span(start, stop))
                author.questions.append(author.ask_source(joined.ids[start:stop], joined.names[which], spans))
                break


def _assemble(author: Author, documents: Ids, places: list[int], eod_id: int) -> LongSample:
    """Documents with plants at their places, then the questions in random order."""
    order = np.argsort(places, kind="stable")
    at = np.array(places, np.int64)[order]  # [p]
    sizes = np.array([author.plants[i].size for i in order], np.int64)  # [p]
    before = np.concatenate(([0], np.cumsum(sizes)))  # [p + 1]
    parts: list[Ids] = []
    for part, i in zip(np.split(documents, at), [*order, None], strict=True):
        parts += [part, author.plants[i]] if i is not None else [part]
    plants = {
        int(i): Span(int(a), int(a + n)) for i, a, n in zip(order, at + before[:-1], sizes, strict=True)
    }

    def moved(span: Span) -> Span:
        shift = before[np.searchsorted(at, [span.start, span.stop - 1], side="right")]
        return Span(span.start + int(shift[0]), span.stop + int(shift[1]))

    tasks: list[Task] = []
    place = documents.size + int(before[-1])
    for i in author.random.permutation(len(author.questions)):
        question = author.questions[i]
        parts += [piece.ids for piece in question.pieces]
        tasks += _tasks(question, place, plants, moved)
        place += question.size
    ids = np.concatenate([*parts, np.array([eod_id], np.int64)])
    return LongSample(ids, tuple(tasks))


def _tasks(
    question: Question, start: int, plants: dict[int, Span], moved: Callable[[Span], Span]
) -> list[Task]:
    """The tasks of a question that begins at `start`."""
    found, place = [], start
    for piece in question.pieces:
        if piece.text is not None:
            evidence = (*(plants[i] for i in piece.plants), *map(moved, piece.spans))
            found.append(
                Task(question.kind, start, Span(place, place + piece.ids.size), evidence, piece.text)
            )
        place += piece.ids.size
    return found

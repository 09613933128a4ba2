"""What a long sample asks, and the texts that have to stand further up for it to be answered.

Kinds: `needle` (a code stated once), `needles` (several, asked for in another order), `source` (the document
that a passage was in) and `continue` (the last part of a document whose other parts stand in any order).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...errors import UserError
from ..tokenizer import Tokenizer
from .corpus import Corpus, Ids
from .wording import Random, Wording, name

KINDS = ("needle", "needles", "source", "continue")
GROUP = 4
"""Codes that one question of kind `needles` asks for."""
PARTS = 4
"""Parts of a document that is continued; the last one is the answer."""
PART_SHARE, SHORTEST_PART, LONGEST_PART = 64, 8, 256
"""A part takes this share of the window, within these numbers of tokens."""
LEAST_DOCUMENTS = 4
"""Documents of a sample that asks where a passage was."""
PASSAGE = 48
"""Tokens of a quoted passage."""
TRIES = 20
EMPTY_TRIES = 1000
"""Documents without text in a row, at least, until it is said that there are no others."""


class Span(NamedTuple):
    """Tokens [start, stop)."""

    start: int
    stop: int


@dataclass(frozen=True)
class Task:
    """A question of a finished sample. Positions count tokens of the sample."""

    kind: str
    question: int
    """First token of the question."""
    answer: Span
    evidence: tuple[Span, ...]
    """Where the texts stand that the answer follows from."""
    text: str
    """The answer."""

    @property
    def depth(self) -> float:
        """Where the earliest evidence stands, as a share of the way to the question."""
        return min(span.start for span in self.evidence) / self.question

    def record(self, sample: int) -> dict[str, Any]:
        """The task as an entry of the file beside a corpus."""
        return {
            "sample": sample,
            "task": self.kind,
            "question": self.question,
            "answer": list(self.answer),
            "evidence": [list(span) for span in self.evidence],
            "text": self.text,
        }


@dataclass(frozen=True)
class Piece:
    """Tokens of a question; an answer where there is a `text`."""

    ids: Ids
    text: str | None = None
    plants: tuple[int, ...] = ()
    """Numbers of the plants that the answer follows from."""
    spans: tuple[Span, ...] = ()
    """Spans of the joined documents that it follows from."""


@dataclass(frozen=True)
class Question:
    """Its pieces in order."""

    kind: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Tokens."""
        return sum(piece.ids.size for piece in self.pieces)


class Author:
    """Writes the plants and questions of one sample."""

    def __init__(self, tokenizer: Tokenizer, wording: Wording, random: Random) -> None:
        self.tokenizer, self.wording, self.random = tokenizer, wording, random
        self.plants: list[Ids] = []
        self.questions: list[Question] = []

    @property
    def size(self) -> int:
        """Tokens of all that was written."""
        plants = sum(plant.size for plant in self.plants)
        return plants + sum(question.size for question in self.questions)

    def ids(self, text: str) -> Ids:
        """Tokens of a text."""
        return self.tokenizer.encode_array(text, np.int64)

    def ask_codes(self, singles: int, groups: int, unasked: int) -> None:
        """State codes; ask for `singles` one by one, for `groups` of GROUP in another order."""
        pairs = self.wording.draw(self.random, singles + GROUP * groups + unasked)
        asked = [
            (key, value, self._plant(self.wording.statement.format(key=key, value=value)))
            for key, value in pairs
        ]
        for code in asked[:singles]:
            self.questions.append(Question("needle", tuple(self._code(*code))))
        for first in range(singles, singles + GROUP * groups, GROUP):
            order = [first + int(i) for i in self.random.permutation(GROUP)]
            pieces = [piece for i in order for piece in self._code(*asked[i])]
            self.questions.append(Question("needles", tuple(pieces)))

    def ask_continuation(self, corpus: Corpus, documents: Iterator[int], label: str, length: int) -> None:
        """Plant all parts but the last of the next document that is long enough, and ask for that one."""
        found = next((i for i in islice(documents, TRIES) if corpus.length(i) > PARTS * SHORTEST_PART), None)
        if found is None:
            return
        part = min(
            max(length // PART_SHARE, SHORTEST_PART), LONGEST_PART, (corpus.length(found) - 1) // PARTS
        )
        start = int(self.random.randint(corpus.length(found) - PARTS * part))
        text = corpus.read(found, start, PARTS * part)
        if text.size != PARTS * part:  # an end token inside a document
            return
        parts = text.reshape(PARTS, part)
        numbers = []
        for i in range(PARTS - 1):
            heading = self.ids(f"\n[{label}, part {i + 1} of {PARTS}]\n")
            numbers.append(len(self.plants))
            self.plants.append(np.concatenate((heading, parts[i], self.ids("\n"))))
        asked = Piece(self.ids(f"\n[{label}, part {PARTS} of {PARTS}]\n"))
        answer = Piece(parts[-1], self.tokenizer.decode(parts[-1].tolist()), tuple(numbers))
        self.questions.append(Question("continue", (asked, answer, Piece(self.ids("\n")))))

    def ask_source(self, passage: Ids, label: str, spans: tuple[Span, ...]) -> Question:
        """In which document a passage was."""
        before, behind = self.ids('\nThe passage "'), self.ids('" is from document')
        asked = Piece(np.concatenate((before, passage, behind)))
        answer = Piece(self.ids(f" {label}"), f" {label}", spans=spans)
        return Question("source", (asked, answer, Piece(self.ids(".\n"))))

    def _plant(self, text: str) -> int:
        self.plants.append(self.ids(text))
        return len(self.plants) - 1

    def _code(self, key: str, value: str, plant: int) -> list[Piece]:
        wording = self.wording
        answer = wording.answer.format(value=value)
        return [
            Piece(self.ids(wording.question.format(key=key))),
            Piece(self.ids(answer), answer, (plant,)),
            Piece(self.ids(wording.tail)),
        ]


@dataclass(frozen=True)
class Joined:
    """Documents one behind another. Letters: d documents."""

    ids: Ids
    headings: Sequence[Span]  # [d]
    names: Sequence[str]  # [d]
    stops: Sequence[int]  # [d], where each document ends

    def outside_headings(self, place: int) -> int:
        """The place itself, or the end of the heading that it is inside of."""
        which = self._document(place)
        heading = self.headings[which]
        return heading.stop if heading.start < place < heading.stop else place

    def passage(self, start: int, size: int) -> int | None:
        """The document that holds these tokens, where one does and they are found nowhere else."""
        which = self._document(start)
        if start < self.headings[which].stop or start + size > self.stops[which]:
            return None
        text, wanted = self.ids.tobytes(), self.ids[start : start + size].tobytes()
        first = text.find(wanted)
        return which if text.find(wanted, first + 1) < 0 else None

    def _document(self, place: int) -> int:
        return int(np.searchsorted(self.stops, place, side="right").clip(0, len(self.stops) - 1))


def join_documents(
    author: Author, corpus: Corpus, documents: Iterator[int], names: Iterator[int], size: int, headed: bool
) -> Joined:
    """At least `size` tokens of documents; the last may lack its end.

    If `headed` each has a heading, and of one that would fill more than a share of the window only such a
    part is taken, so that there are several to tell apart. Documents without text are passed over.

    Raises:
        UserError: nearly no document has text.
    """
    most = size // LEAST_DOCUMENTS if headed else size
    parts: list[Ids] = []
    headings, labels, stops, filled, empty = [], [], [], 0, 0
    while filled < size:
        number, label = next(documents), name(next(names))
        heading = author.ids(f"\n# Document {label}\n") if headed else np.empty(0, np.int64)
        left = max(1, min(most, size - filled - heading.size))
        spare = corpus.length(number) - left
        # Of what does not fit, another part each time.
        text = corpus.read(number, int(author.random.randint(spare)) if spare > 1 else 0, left)
        empty = 0 if text.size else empty + 1
        # All documents come within twice their number.
        if empty > max(EMPTY_TRIES, 2 * len(corpus)):
            raise UserError(f"{corpus.names}: {empty} documents in a row hold no text; name other sources")
        if text.size:
            parts += [heading, text]
            headings.append(Span(filled, filled + heading.size))
            labels.append(label)
            filled += heading.size + text.size
            stops.append(filled)
    return Joined(np.concatenate(parts), headings, labels, stops)

"""How a fact is stated and asked for, and the names that go with it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import UserError

WORDS = (
    "amber", "anchor", "apple", "arrow", "autumn", "barrel", "basket", "beacon", "birch", "bridge",
    "bronze", "candle", "canyon", "cedar", "cellar", "cherry", "cloud", "cobalt", "copper", "coral",
    "cotton", "crystal", "desert", "eagle", "ember", "falcon", "feather", "forest", "fossil", "garden",
    "granite", "harbour", "hazel", "heron", "island", "ivory", "jasper", "kettle", "ladder", "lantern",
    "lemon", "linen", "maple", "marble", "meadow", "mirror", "needle", "nickel", "north", "olive",
    "orchid", "otter", "paper", "pebble", "pepper", "pillar", "quartz", "raven", "river", "saddle",
    "silver", "stone", "timber", "velvet",
)  # fmt: skip
NUMBERS = 9000
FIRST_NUMBER, FIRST_CODE, CODES = 1000, 10000, 90000

Random = np.random.RandomState


@dataclass(frozen=True)
class Wording:
    """Texts of a key and its value. What is stated and what is asked with its answer may read alike."""

    statement: str
    question: str
    answer: str
    tail: str
    """Behind the answer of a question."""
    keys: int
    values: int
    key: Callable[[int], str]
    value: Callable[[int], str]

    @property
    def most(self) -> int:
        """Different codes of one sample."""
        return min(self.keys, self.values)

    def draw(self, random: Random, count: int) -> list[tuple[str, str]]:
        """That many keys and values of one sample, no key and no value twice.

        Raises:
            UserError: there are not as many.
        """
        if count > self.most:
            raise UserError(f"{count} codes in a sample; this wording has {self.most}: ask for fewer")
        keys, values = distinct(random, count, self.keys), distinct(random, count, self.values)
        return [(self.key(key), self.value(value)) for key, value in zip(keys, values, strict=True)]


def name(number: int) -> str:
    """One of len(WORDS) x NUMBERS names, as of documents."""
    return f"{WORDS[number // NUMBERS]}-{FIRST_NUMBER + number % NUMBERS}"


NAMES = len(WORDS) * NUMBERS

WORDINGS = {
    "sentence": Wording(
        "\nThe code of {key} is {value}.\n",
        "\nThe code of {key} is",
        " {value}",
        ".\n",
        NAMES,
        CODES,
        name,
        lambda number: str(FIRST_CODE + number),
    ),
    "compact": Wording(
        "<{key}:{value}>",
        "<{key}:",
        "{value}",
        ">",
        26,
        16,
        lambda number: chr(ord("A") + number),
        lambda number: chr(ord("a") + number),
    ),
}
"""sentence: English, for models that read. compact: five bytes, a key and a value of one byte each, which a
small model of bytes learns within minutes."""


def distinct(random: Random, count: int, limit: int) -> list[int]:
    """`count` different numbers below `limit`, in random order."""
    assert count <= limit
    if 2 * count > limit:
        return [int(number) for number in random.permutation(limit)[:count]]
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen[int(random.randint(limit))] = None
    return list(chosen)


def endless(random: Random, limit: int) -> Iterator[int]:
    """All numbers below `limit` in random order, then in another one, and so on."""
    while True:
        seen: set[int] = set()
        while 2 * len(seen) < limit:
            number = int(random.randint(limit))
            if number not in seen:
                seen.add(number)
                yield number
        rest = np.setdiff1d(np.arange(limit), np.fromiter(seen, np.int64, len(seen)))
        yield from (int(number) for number in random.permutation(rest))

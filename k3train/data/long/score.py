"""Which questions of long samples are answered rightly, by where their evidence lies. Imports no torch.

An answer is right where each of its tokens is the likeliest one behind all true tokens before it. Depth is
the place of the earliest evidence as a share of the way to the question: 0 at the window's beginning.
Letters: b samples, s tokens, g groups, d depths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .corpus import Ids
from .mix import LongSample

DEPTHS = 5
FILE = "needles.json"

Predict = Callable[[Ids], Ids]
"""Tokens [b, s] -> the likeliest next token behind each [b, s]."""


@dataclass(frozen=True)
class Table:
    """Answers by group of questions, as the window's length or the kind of task, and by depth."""

    title: str
    groups: tuple[str, ...]
    right: npt.NDArray[np.int64]  # [g, d]
    asked: npt.NDArray[np.int64]  # [g, d]
    chance: tuple[float | None, ...]  # [g], accuracy without the evidence, where it is known

    def accuracy(self, group: str) -> float:
        """Share answered rightly over all depths."""
        row = self.groups.index(group)
        return float(self.right[row].sum() / max(int(self.asked[row].sum()), 1))

    def by_depth(self, group: str) -> list[float | None]:
        """The same by depth [d]; None where nothing was asked."""
        row = self.groups.index(group)
        pairs = zip(self.right[row].tolist(), self.asked[row].tolist(), strict=True)
        return [right / asked if asked else None for right, asked in pairs]

    def rows(self) -> list[list[str]]:
        """Cells of the table as text, the heading first."""
        count = self.right.shape[1]
        depths = [f"{100 * i // count}-{100 * (i + 1) // count}%" for i in range(count)]
        cells = [[self.title, "asked", "right", "chance", *depths]]
        for row, (group, chance) in enumerate(zip(self.groups, self.chance, strict=True)):
            shares = ["-" if share is None else f"{share:.0%}" for share in self.by_depth(group)]
            known = "-" if chance is None else f"{chance:.1%}"
            cells.append([group, f"{self.asked[row].sum():,}", f"{self.accuracy(group):.1%}", known, *shares])
        return cells

    def __str__(self) -> str:
        cells = self.rows()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
        )

    def record(self) -> dict[str, Any]:
        """What `read` reads."""
        sums = {"right": self.right.tolist(), "asked": self.asked.tolist()}
        return {"title": self.title, "groups": self.groups, "chance": self.chance, **sums}


def read(folder: Path) -> Table | None:
    """The table beside a run; None where there is none, or it is not whole."""
    try:
        found = json.loads((folder / FILE).read_text())
        right, asked = (np.array(found[name], np.int64) for name in ("right", "asked"))
        groups, chance = tuple(map(str, found["groups"])), tuple(found["chance"])
        return Table(str(found["title"]), groups, right, asked, chance)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def score(
    title: str,
    groups: Sequence[tuple[str, Iterable[LongSample], float | None]],
    predict: Predict,
    *,
    batch_tokens: int = 8192,
    depths: int = DEPTHS,
    by_kind: bool = False,
) -> Table:
    """Ask every question of every sample; a group has a name, samples of one length, and chance.

    Args:
        batch_tokens: tokens of the samples given to `predict` at a time, at least one sample.
        by_kind: the table's groups are kinds of tasks instead.
    """
    counts: dict[str, npt.NDArray[np.int64]] = {}
    known = {} if by_kind else {name: chance for name, _, chance in groups}
    for name, samples, _ in groups:
        for batch in _batches(samples, batch_tokens):
            ids = np.stack([sample.ids for sample in batch])  # [b, s + 1]
            right = predict(ids[:, :-1]) == ids[:, 1:]  # [b, s]
            for sample, row in zip(batch, right, strict=True):
                for task in sample.tasks:
                    of = counts.setdefault(task.kind if by_kind else name, np.zeros((2, depths), np.int64))
                    start, stop = task.answer
                    depth = min(int(task.depth * depths), depths - 1)
                    of[:, depth] += (bool(row[start - 1 : stop - 1].all()), 1)
    names = tuple(counts)
    both = np.stack([counts[name] for name in names], axis=1)  # [2, g, d]
    return Table(title, names, both[0], both[1], tuple(known.get(name) for name in names))


def _batches(samples: Iterable[LongSample], batch_tokens: int) -> Iterable[list[LongSample]]:
    batch: list[LongSample] = []
    for sample in samples:
        batch.append(sample)
        if (len(batch) + 1) * sample.ids.size > batch_tokens:
            yield batch
            batch = []
    if batch:
        yield batch

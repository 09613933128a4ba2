"""Which rows of a growing bank cross which edge of the pipeline. Imports no torch.

A stage reads all rows made by earlier stages. A rank keeps the rows that it has received or made for an
earlier chunk, so that only rows that are new to it travel with the running tensor. `cache=False` is the plain
alternative: every edge carries the whole bank. Source: Attention Residuals (arXiv:2603.15031), where a rank
keeps what it received; keeping what it made as well saves (V - 1) P more rows a micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from .table import Layout


@dataclass(frozen=True)
class RowPlan:
    """`made[row]` is the stage that makes a row, in ascending order."""

    layout: Layout
    made: tuple[int, ...]
    cache: bool = True

    def known(self, stage: int) -> int:
        """Rows made before a stage: what it reads beside the running tensor."""
        return bisect_left(self.made, stage)

    def arriving(self, stage: int) -> range:
        """Rows that travel into a stage with the running tensor."""
        if stage == 0:
            return range(0)
        return range(self._present(stage) if self.cache else 0, self.known(stage))

    def created(self, stage: int) -> range:
        """Rows that a stage makes."""
        return range(self.known(stage), self.known(stage + 1))

    def width(self, stage: int) -> int:
        """Tensors of hidden width in the message into a stage, the running one included."""
        return len(self.arriving(stage)) + 1

    def rows_sent(self) -> int:
        """Rows that cross ranks for one micro-batch, forward; the running tensors are not counted."""
        return sum(len(self.arriving(stage)) for stage in self._entered())

    def published_rows_sent(self) -> int:
        """The same if a rank kept the rows that it received, but not those that it made."""
        sent = 0
        for stage in self._entered():
            rank, chunk = self.layout.home(stage)
            sent += self.known(stage)
            if chunk:
                sent -= self.known(self.layout.stage(rank, chunk - 1))
        return sent

    def _entered(self) -> list[int]:
        """Stages whose input comes from another rank."""
        home = self.layout.home
        return [stage for stage in range(1, self.layout.stages) if home(stage)[0] != home(stage - 1)[0]]

    def _present(self, stage: int) -> int:
        """Rows that the stage's rank holds from its earlier chunks."""
        rank, chunk = self.layout.home(stage)
        return 0 if chunk == 0 else self.known(self.layout.stage(rank, chunk - 1) + 1)


def naive_rows(stages: int) -> int:
    """Rows a micro-batch sends when every stage makes one and every edge carries all of them."""
    return stages * (stages - 1) // 2


def published_rows(pipeline: int, virtual: int) -> int:
    """The same when a rank keeps the rows that it has received."""
    return pipeline * (pipeline - 1) // 2 + (virtual - 1) * pipeline**2


def cached_rows(pipeline: int, virtual: int) -> int:
    """The same when it keeps the rows that it has made, too: what `RowPlan` does."""
    return pipeline * (pipeline - 1) // 2 + (virtual - 1) * pipeline * (pipeline - 1)

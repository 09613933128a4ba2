"""Which corpus a sample comes from, when several are mixed by weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from .packed import Sample


class Windows(Protocol):
    """Endless samples of one corpus, each a function of its index."""

    def __getitem__(self, index: int) -> Sample: ...


class Blend[W: Windows]:
    """Sample `i` of a weighted mix, a pure function of `i`: any prefix holds each corpus in proportion.

    Corpus c's j-th sample is due at time (j + 1/2) / w_c. The mix is all samples in the order of their times
    (then of their corpora), so of n samples a corpus gives n * w_c, give or take about one for each corpus.
    """

    def __init__(self, corpora: Sequence[W], weights: Sequence[float]) -> None:
        assert len(corpora) == len(weights) > 0 and min(weights) > 0
        self.corpora = list(corpora)
        # Exact, so that no rounding decides which of two samples is earlier.
        exact = [Fraction(weight) for weight in weights]
        self.weights = [weight / sum(exact) for weight in exact]

    def __getitem__(self, index: int) -> Sample:
        corpus, position = self.locate(index)
        return {**self.corpora[corpus][position], "sample_id": index}

    def locate(self, index: int) -> tuple[int, int]:
        """(corpus, sample of that corpus) at `index` of the mix."""
        if len(self.weights) == 1:
            return 0, index
        # By time t between t - C/2 and t + C/2 samples are due, C being the number of corpora.
        margin = len(self.weights)
        first = [max(0, math.ceil(weight * (index - margin) - Fraction(1, 2))) for weight in self.weights]
        last = [max(0, math.ceil(weight * (index + margin) - Fraction(1, 2))) for weight in self.weights]
        due = sorted(
            ((2 * position + 1) / (2 * weight), corpus, position)
            for corpus, weight in enumerate(self.weights)
            for position in range(first[corpus], last[corpus])
        )
        _, corpus, position = due[index - sum(first)]
        return corpus, position

"""The documents that long samples are made of, of one or several prepared corpora."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ..indexed import IndexedCorpus

Ids = npt.NDArray[np.int64]
SCAN_TOKENS = 1 << 20


class Corpus:
    """Documents by number, over all corpora in their order."""

    def __init__(self, corpora: Sequence[IndexedCorpus], eod_id: int) -> None:
        self.corpora = list(corpora)
        self.eod_id = eod_id
        self._ends = np.cumsum([len(corpus) for corpus in corpora])
        self.num_tokens = sum(corpus.num_tokens for corpus in corpora)
        if not any(_has_text(corpus, eod_id) for corpus in corpora):
            raise UserError(f"{self.names or 'no source'}: no documents to join that hold text")

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.corpora else 0

    @property
    def names(self) -> str:
        """Its corpora, for messages."""
        return ", ".join(corpus.prefix for corpus in self.corpora)

    def read(self, number: int, start: int = 0, count: int | None = None) -> Ids:
        """Up to `count` tokens of a document from `start` on, without end tokens."""
        which = int(np.searchsorted(self._ends, number, side="right"))
        corpus = self.corpora[which]
        place = number - (int(self._ends[which - 1]) if which else 0)
        length = int(corpus.lengths[place])
        stop = length if count is None else min(length, start + count)
        tokens = corpus.read(place, start, stop)
        return tokens[tokens != self.eod_id].astype(np.int64)

    def length(self, number: int) -> int:
        """Tokens of a document, end token included."""
        which = int(np.searchsorted(self._ends, number, side="right"))
        return int(self.corpora[which].lengths[number - (int(self._ends[which - 1]) if which else 0)])


def _has_text(corpus: IndexedCorpus, eod_id: int) -> bool:
    """Whether a corpus holds anything but end tokens."""
    starts = range(0, corpus.num_tokens, SCAN_TOKENS)
    return any((corpus.tokens[start : start + SCAN_TOKENS] != eod_id).any() for start in starts)

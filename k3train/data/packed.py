"""Documents packed back to back into windows, endlessly, each window a pure function of its index.

Every epoch puts the documents into a new order, cuts the stream into windows and shuffles those. Nothing
depends on how many samples a run asks for, so a run that is extended sees the same data as one that was
longer from the start; megatron-core's GPTDataset shuffles all its epochs together and cannot promise that.
Letters: s sequence, d documents of an epoch, w windows of an epoch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .indexed import IndexedCorpus

Sample = dict[str, Any]


@dataclass(frozen=True)
class LongDocuments:
    """Documents that stand in every epoch several times."""

    at_least: int | None = None
    """Tokens; None for no document."""
    times: int = 1

    def copies(self, lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Times that each document of these lengths stands in an epoch."""
        found = np.ones(len(lengths), np.int64)
        if self.at_least is not None:
            found[lengths >= self.at_least] = self.times
        return found


EVERY_DOCUMENT_ONCE = LongDocuments()


@dataclass(frozen=True)
class LongShare:
    """Long documents of some corpora, and what they are of an epoch."""

    documents: int = 0
    long_documents: int = 0
    tokens: int = 0
    """Of the corpora, every document once."""
    long_tokens: int = 0
    epoch_tokens: int = 0
    epoch_long_tokens: int = 0

    def __add__(self, other: LongShare) -> LongShare:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return LongShare(*(mine + its for mine, its in pairs))


def long_share(lengths: npt.NDArray[np.integer[Any]], long: LongDocuments) -> LongShare:
    """Counts over documents of these lengths, tokens each."""
    is_long = np.zeros(len(lengths), bool) if long.at_least is None else lengths >= long.at_least
    tokens, of_long = int(lengths.sum(dtype=np.int64)), int(lengths[is_long].sum(dtype=np.int64))
    in_epoch = tokens + (long.times - 1) * of_long
    return LongShare(len(lengths), int(is_long.sum()), tokens, of_long, in_epoch, long.times * of_long)


class PackedWindows:
    """Sample `i` of one corpus: s + 1 tokens that give s inputs and s labels.

    Long documents stand in an epoch as often as `long_documents` says, each copy at a place of its own. The
    tokens behind the last whole window of an epoch are dropped; another order drops others. A corpus
    shorter than one window gives that one window, padded, with `loss_mask` 0 where the label is padding.
    """

    def __init__(
        self,
        corpus: IndexedCorpus,
        sequence_length: int,
        *,
        seed: int,
        vocab_size: int,
        pad_id: int,
        long_documents: LongDocuments = EVERY_DOCUMENT_ONCE,
    ) -> None:
        if corpus.num_tokens < 2:
            raise UserError(f"{corpus.prefix} holds {corpus.num_tokens} tokens: too few to predict one")
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.seed = seed
        self.vocab_size = vocab_size
        self.pad_id = pad_id
        copies = long_documents.copies(corpus.lengths)
        self._epoch_documents = np.repeat(np.arange(len(corpus)), copies)  # [d]
        self.num_tokens = int(corpus.lengths[self._epoch_documents].sum(dtype=np.int64))
        """In an epoch."""
        self.long = long_share(corpus.lengths, long_documents)
        self.windows_per_epoch = max(1, (self.num_tokens - 1) // sequence_length)
        self._epoch = -1

    def __getitem__(self, index: int) -> Sample:
        """tokens [s] int64, labels [s] int64, loss_mask [s] float32, sample_id."""
        epoch, position = divmod(index, self.windows_per_epoch)
        self._shuffle(epoch)
        window = self._read(int(self._windows[position]) * self.sequence_length)  # [s + 1]
        if window.max() >= self.vocab_size:
            raise UserError(
                f"{self.corpus.prefix} holds token {window.max()}, and data.tokenizer has "
                f"{self.vocab_size} ids: prepare it with that tokenizer"
            )
        missing = self.sequence_length + 1 - window.size
        loss_mask = np.ones(self.sequence_length, np.float32)
        if missing > 0:
            loss_mask[-missing:] = 0
            window = np.concatenate((window, np.full(missing, self.pad_id)))
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": loss_mask, "sample_id": index}

    def _shuffle(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        # RandomState's streams are frozen by NumPy's policy; those of Generator may change.
        random = np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, epoch])
        self._documents = self._epoch_documents[random.permutation(len(self._epoch_documents))]  # [d]
        self._ends = np.cumsum(self.corpus.lengths[self._documents], dtype=np.int64)  # [d]
        self._windows = random.permutation(self.windows_per_epoch)  # [w]
        self._epoch = epoch

    def _read(self, start: int) -> npt.NDArray[np.int64]:
        """Up to s + 1 tokens of this epoch's stream from `start` on."""
        left = self.sequence_length + 1
        row = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while left and row < len(self._documents):
            document = int(self._documents[row])
            length = int(self.corpus.lengths[document])
            first = max(0, start - int(self._ends[row]) + length)
            parts.append(self.corpus.read(document, first, min(length, first + left)))
            left -= parts[-1].size
            row += 1
        return np.concatenate(parts).astype(np.int64)

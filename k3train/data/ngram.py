"""A bigram model: the loss that a trained model must beat on the same split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SMOOTHING = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
CHUNK = 1 << 22
# Counts are a dense [v, v] table: 128 MiB at this size.
LARGEST_VOCABULARY = 4096


def byte_bigram_loss(
    train: npt.NDArray[Any],
    windows: Iterable[npt.NDArray[Any]],
    vocab_size: int,
    smoothing: Sequence[float] = SMOOTHING,
) -> float:
    """Nats per token of P(b | a) = (count(ab) + k) / (count(a) + k v) fitted on `train` [n].

    `windows` are the s + 1 tokens of each validation sample; the first one is context only. The k of
    `smoothing` that gives the lowest validation loss is used, which favours the bigram model.

    Raises:
        ValueError: the vocabulary is too large for a table of pairs, or there is nothing to predict.
    """
    if vocab_size > LARGEST_VOCABULARY:
        raise ValueError(f"vocabulary {vocab_size} is too large for a table of pairs: {LARGEST_VOCABULARY}")
    tested = np.zeros((vocab_size, vocab_size), np.int64)  # [v, v]
    for window in windows:
        tested += _pair_counts(np.asarray(window), vocab_size)
    if not np.any(tested):
        raise ValueError("no validation window has two tokens")
    counts = _pair_counts(train, vocab_size)  # [v, v]
    seen = tested > 0
    contexts = counts.sum(axis=1, keepdims=True)  # [v, 1]
    losses = [
        np.sum((tested * (np.log(contexts + k * vocab_size) - np.log(counts + k)))[seen]) for k in smoothing
    ]
    return float(min(losses) / np.sum(tested))


def _pair_counts(tokens: npt.NDArray[Any], vocab_size: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(vocab_size * vocab_size, np.int64)
    for start in range(0, len(tokens) - 1, CHUNK):
        piece = tokens[start : start + CHUNK + 1].astype(np.int64)
        counts += np.bincount(piece[:-1] * vocab_size + piece[1:], minlength=counts.size)
    return counts.reshape(vocab_size, vocab_size)

"""The bigram baseline against counts done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from k3train.data.ngram import byte_bigram_loss


def test_by_hand() -> None:
    train = np.array([0, 1, 0, 1, 0, 2], np.uint16)
    # Pairs: 01 twice, 10 twice, 02 once. With k = 1, v = 3:
    # P(1|0) = 3/6, P(2|0) = 2/6, P(0|1) = 3/5, P(1|2) = 1/3.
    windows = [np.array([0, 1, 0]), np.array([0, 2, 1])]
    expected = -(math.log(3 / 6) + math.log(3 / 5) + math.log(2 / 6) + math.log(1 / 3)) / 4
    assert byte_bigram_loss(train, windows, 3, smoothing=(1.0,)) == pytest.approx(expected, rel=1e-12)


def test_best_smoothing_is_used() -> None:
    random = np.random.RandomState(0)
    train = np.cumsum(random.randint(0, 3, 5000)) % 50
    windows = [(np.cumsum(random.randint(0, 3, 200)) % 50)]
    each = [byte_bigram_loss(train, windows, 50, (k,)) for k in (10.0, 1.0, 0.01)]
    assert byte_bigram_loss(train, windows, 50, (10.0, 1.0, 0.01)) == min(each) < max(each)
    # Three equally likely successors: the loss approaches log 3 from above.
    assert math.log(3) < min(each) < math.log(3) + 0.05


def test_windows_are_not_joined_and_chunks_lose_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(1)
    train, windows = random.randint(0, 9, 1000), [random.randint(0, 9, 30) for _ in range(3)]
    whole = byte_bigram_loss(train, windows, 9)
    assert whole != byte_bigram_loss(train, [np.concatenate(windows)], 9)
    monkeypatch.setattr("k3train.data.ngram.CHUNK", 7)
    assert byte_bigram_loss(train, windows, 9) == whole


def test_refusals() -> None:
    with pytest.raises(ValueError, match="too large for a table of pairs"):
        byte_bigram_loss(np.array([0, 1]), [np.array([0, 1])], 160_000)
    with pytest.raises(ValueError, match="no validation window"):
        byte_bigram_loss(np.array([0, 1]), [np.array([0])], 3)

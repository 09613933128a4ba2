"""Windows as a pure function of their index; blends in proportion."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from k3train.config import DataConfig, LongDocumentsConfig
from k3train.data.blend import Blend
from k3train.data.datasets import build_datasets, describe_long
from k3train.data.indexed import open_corpus
from k3train.data.packed import LongDocuments, LongShare, PackedWindows
from k3train.data.tokenizer import load_tokenizer
from k3train.errors import UserError

MakeCorpus = Callable[[str, list[list[int]]], str]
SEQUENCE = 8


def documents(lengths: list[int]) -> list[list[int]]:
    """Every token is unique, so a window shows where it came from."""
    ends = np.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


def packed(prefix: str, seed: int = 1, sequence: int = SEQUENCE, vocab_size: int = 60000) -> PackedWindows:
    return PackedWindows(open_corpus(prefix), sequence, seed=seed, vocab_size=vocab_size, pad_id=59999)


def test_an_epoch_holds_each_window_once_and_documents_stay_whole(make_corpus: MakeCorpus) -> None:
    lengths = [3, 20, 1, 9, 14, 30, 2, 8, 8, 5]  # 100 tokens
    windows = packed(make_corpus("a", documents(lengths)))
    assert windows.windows_per_epoch == 99 // SEQUENCE
    for epoch in range(3):
        samples = [windows[epoch * 12 + i] for i in range(12)]
        seen = np.concatenate([sample["tokens"] for sample in samples])
        assert len(seen) == 96 and len(set(seen.tolist())) == 96
        starts = set(np.cumsum([0, *lengths]).tolist())
        for sample in samples:
            assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()
            steps = zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True)
            # Behind a token comes the next of its document, or the first of some document after its last.
            assert all(b == a + 1 or (b in starts and a + 1 in starts) for a, b in steps)
            assert sample["loss_mask"].tolist() == [1.0] * SEQUENCE


def test_stream_of_one_document_order_is_cut_without_gaps(make_corpus: MakeCorpus) -> None:
    windows = packed(make_corpus("a", documents([40])))
    samples = sorted((windows[i]["tokens"].tolist(), windows[i]["labels"].tolist()) for i in range(4))
    assert samples == [([*range(s, s + 8)], [*range(s + 1, s + 9)]) for s in (0, 8, 16, 24)]


def test_order_depends_on_seed_and_epoch_only(make_corpus: MakeCorpus) -> None:
    prefix = make_corpus("a", documents([7] * 60))
    first, again, other = packed(prefix), packed(prefix), packed(prefix, seed=2)
    count = first.windows_per_epoch
    forward = [first[i]["tokens"].tolist() for i in range(3 * count)]
    backward = [again[i]["tokens"].tolist() for i in reversed(range(3 * count))][::-1]
    assert forward == backward
    assert forward != [other[i]["tokens"].tolist() for i in range(3 * count)]
    assert forward[:count] != forward[count : 2 * count]


def test_frozen_stream(make_corpus: MakeCorpus) -> None:
    windows = packed(make_corpus("a", documents([4] * 10)), seed=1234)
    assert [int(windows[i]["tokens"][0]) for i in range(8)] == [0, 12, 32, 8, 36, 20, 16, 8]


def test_short_corpus_is_one_padded_window(make_corpus: MakeCorpus) -> None:
    windows = packed(make_corpus("a", [[1, 2], [3]]))
    sample = windows[5]
    assert windows.windows_per_epoch == 1
    assert sample["loss_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert sorted(sample["tokens"][:3].tolist()) == [1, 2, 3]
    assert sample["labels"][2:].tolist() == [59999] * 6


def test_refusals(make_corpus: MakeCorpus) -> None:
    with pytest.raises(UserError, match="holds 1 tokens"):
        packed(make_corpus("one", [[1]]))
    with pytest.raises(UserError, match=r"holds token 3000, and data.tokenizer has 259 ids"):
        packed(make_corpus("big", [[3000] * 20]), vocab_size=259)[0]


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [5, 2, 0.001], [1 / 3, 1 / 7, 1e9, 40.0]])
def test_blend_keeps_proportions_in_every_prefix(weights: list[float]) -> None:
    blend = Blend([None] * len(weights), weights)  # type: ignore[list-item]
    places = [blend.locate(i) for i in range(2000)]
    counts = [0] * len(weights)
    for number, (corpus, position) in enumerate(places):
        assert position == counts[corpus], "each corpus is read in its own order, with no gap"
        counts[corpus] += 1
        for share, count in zip(np.array(weights) / sum(weights), counts, strict=True):
            assert abs(count - share * (number + 1)) <= len(weights) / 2 + 0.5


def test_blend_far_out_equals_counting() -> None:
    blend = Blend([None, None], [0.7, 0.3])  # type: ignore[list-item]
    far = 10**12
    assert [blend.locate(far + i)[1] for i in range(10) if blend.locate(far + i)[0] == 0] == [
        7 * 10**11 + i for i in range(7)
    ]


def test_blend_reads_the_corpora(make_corpus: MakeCorpus) -> None:
    low = packed(make_corpus("low", [[1] * 50]))
    high = packed(make_corpus("high", [[2] * 50]))
    blend = Blend([low, high], [3.0, 1.0])
    origins = [int(blend[i]["tokens"][0]) for i in range(400)]
    assert origins.count(1) == 300
    assert blend[77]["sample_id"] == 77


def occurrences(windows: PackedWindows, epoch: int) -> dict[int, int]:
    """Times that each token stands in an epoch, each its own; what the last window leaves is counted too."""
    windows[epoch * windows.windows_per_epoch]
    stream = windows._read(0)
    while stream.size < windows.num_tokens:
        stream = np.concatenate((stream, windows._read(stream.size)))
    tokens, counts = np.unique(stream[: windows.num_tokens], return_counts=True)
    return dict(zip(tokens.tolist(), counts.tolist(), strict=True))


def test_long_documents_stand_in_every_epoch_exactly_as_often_as_told(make_corpus: MakeCorpus) -> None:
    lengths = [3, 20, 1, 9, 14, 30, 2, 8, 8, 5]  # 100 tokens, of which 20 + 14 + 30 in long documents
    corpus = open_corpus(make_corpus("a", documents(lengths)))
    long = LongDocuments(at_least=14, times=3)
    windows = PackedWindows(corpus, SEQUENCE, seed=1, vocab_size=60000, pad_id=59999, long_documents=long)
    assert windows.num_tokens == 100 + 2 * 64 and windows.windows_per_epoch == 227 // SEQUENCE
    of_document = np.repeat(np.arange(len(lengths)), lengths)
    for epoch in range(3):
        found = occurrences(windows, epoch)
        assert found == {
            token: 3 if lengths[document] >= 14 else 1 for token, document in enumerate(of_document.tolist())
        }
    assert sorted(windows._documents.tolist()) == sorted([*range(10), 1, 1, 4, 4, 5, 5])
    assert windows.long == LongShare(10, 3, 100, 64, 228, 192)


def test_up_sampling_nothing_is_the_same_order(make_corpus: MakeCorpus) -> None:
    prefix = make_corpus("a", documents([7] * 60))
    plain = packed(prefix)
    for long in (LongDocuments(at_least=8, times=5), LongDocuments(at_least=1, times=1)):
        other = PackedWindows(
            open_corpus(prefix), SEQUENCE, seed=1, vocab_size=60000, pad_id=59999, long_documents=long
        )
        for index in (0, 51, 52, 200):
            assert other[index]["tokens"].tolist() == plain[index]["tokens"].tolist()


def test_a_blend_without_weights_counts_copies(make_corpus: MakeCorpus) -> None:
    short = make_corpus("short", documents([10] * 10))
    long = make_corpus("long", documents([50, 50]))
    data = DataConfig(source="indexed", train=[short, long], valid=[short])
    data.long_documents = LongDocumentsConfig(at_least=50, times=3)
    tokenizer = load_tokenizer("byte")
    train, valid = build_datasets(data, tokenizer, SEQUENCE, 1, 10, 2)
    assert [float(weight) for weight in train.blend.weights] == [0.25, 0.75]
    assert valid is not None and valid.blend.corpora[0].num_tokens == 100
    assert describe_long(train.blend, data.long_documents) == (
        "documents of 50 tokens and more: 2 of 12, 3 times an epoch; 75.0% of its tokens instead of 50.0%"
    )
    assert describe_long(train.blend, LongDocumentsConfig()) is None

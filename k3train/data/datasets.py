"""The training and the validation samples that a `data` configuration names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ..errors import UserError
from .blend import Blend, Windows
from .bundled import bundled_corpus
from .indexed import IndexedCorpus, open_corpus
from .packed import EVERY_DOCUMENT_ONCE, LongDocuments, LongShare, PackedWindows, Sample
from .prepare import read_info
from .tokenizer import Tokenizer

# Training and validation draw from different streams even when they name the same corpus.
TRAIN_SALT, VALID_SALT = 0, 1 << 32


class LongKeys(Protocol):
    """The keys of `data.long_documents`."""

    at_least: int | None
    times: int


class DataKeys(Protocol):
    """The keys of the `data` section that are read here."""

    source: str
    train: list[str]
    train_weights: list[float] | None

    # Read only, so that a configuration's own class is one.
    @property
    def long_documents(self) -> LongKeys: ...

    valid: list[str]
    cache_dir: str | None
    max_bytes: int | None


class Samples:
    """The first `num_samples` of a blend; each depends on the corpora, the weights and the seed only."""

    def __init__(self, blend: Windows, num_samples: int) -> None:
        self.blend = blend
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        """tokens [s] int64, labels [s] int64, loss_mask [s] float32, sample_id int."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return self.blend[index]


def build_datasets(
    data: DataKeys,
    tokenizer: Tokenizer,
    sequence_length: int,
    seed: int,
    num_train_samples: int,
    num_valid_samples: int,
) -> tuple[Samples, Samples | None]:
    """Training and validation samples; the latter None when none are asked for.

    Raises:
        UserError: a corpus is missing, torn or of another tokenizer; weights do not fit; a list is empty.
    """
    if data.source == "bundled":
        train_prefix, valid_prefix = bundled_corpus(tokenizer, data.cache_dir, data.max_bytes)
        train, valid, weights = [train_prefix], [valid_prefix], None
    else:
        train, valid, weights = data.train, data.valid, data.train_weights
    if not train:
        raise UserError("data.train is empty; name the prefixes that `k3train data prepare` made")
    if not valid and num_valid_samples:
        raise UserError("data.valid is empty; name at least one prefix for the validation loss")

    long = LongDocuments(data.long_documents.at_least, data.long_documents.times)
    blend = _blend(train, weights, tokenizer, sequence_length, seed + TRAIN_SALT, long)
    if not num_valid_samples:
        return Samples(blend, num_train_samples), None
    held_out = _blend(valid, None, tokenizer, sequence_length, seed + VALID_SALT, EVERY_DOCUMENT_ONCE)
    return Samples(blend, num_train_samples), Samples(held_out, num_valid_samples)


def describe_long(blend: Blend[PackedWindows], long: LongKeys) -> str | None:
    """What up-sampling makes of the corpora, in a line; None where nothing is up-sampled."""
    if long.at_least is None or long.times == 1:
        return None
    found = sum((windows.long for windows in blend.corpora), LongShare())
    before, after = found.long_tokens / found.tokens, found.epoch_long_tokens / found.epoch_tokens
    return (
        f"documents of {long.at_least:,} tokens and more: {found.long_documents:,} of {found.documents:,}, "
        f"{long.times} times an epoch; {after:.1%} of its tokens instead of {before:.1%}"
    )


def _blend(
    prefixes: list[str],
    weights: list[float] | None,
    tokenizer: Tokenizer,
    sequence_length: int,
    seed: int,
    long: LongDocuments,
) -> Blend[PackedWindows]:
    if weights is not None:
        _check_weights(prefixes, weights)
    corpora = [_open(prefix, tokenizer) for prefix in prefixes]
    windows = [
        PackedWindows(
            corpus,
            sequence_length,
            seed=seed,
            vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.pad_id,
            long_documents=long,
        )
        for corpus in corpora
    ]
    return Blend(windows, weights or [corpus.num_tokens for corpus in windows])


def _open(prefix: str, tokenizer: Tokenizer) -> IndexedCorpus:
    info = read_info(prefix)
    if info is not None and info.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{prefix} was prepared with tokenizer {info.tokenizer} ({info.fingerprint}), and "
            f"data.tokenizer is {tokenizer.fingerprint}; use that tokenizer or prepare it again"
        )
    return open_corpus(prefix)


def _check_weights(prefixes: Sequence[str], weights: Sequence[float]) -> None:
    if len(weights) != len(prefixes):
        raise UserError(
            f"data.train_weights has {len(weights)} numbers for {len(prefixes)} prefixes in data.train"
        )
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"data.train_weights holds {weight}; valid: positive numbers")

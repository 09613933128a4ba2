"""The .bin/.idx layout against megatron-core's own reader and writer, and torn pairs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from k3train.data.indexed import open_corpus, token_dtype
from k3train.errors import UserError
from parallel.cpu import enable_cpu

MakeCorpus = Callable[[str, list[list[int]]], str]

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [65535, 1]]


@pytest.fixture(scope="module")
def indexed_dataset() -> ModuleType:
    enable_cpu()
    return importlib.import_module("megatron.core.datasets.indexed_dataset")


def test_megatron_reads_ours(indexed_dataset: ModuleType, make_corpus: MakeCorpus) -> None:
    theirs = indexed_dataset.IndexedDataset(make_corpus("ours", DOCUMENTS))
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_megatrons(indexed_dataset: ModuleType, tmp_path: Path, dtype: type) -> None:
    prefix = str(tmp_path / "theirs")
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    corpus = open_corpus(prefix)
    assert corpus.tokens.dtype == dtype
    assert [corpus.read(i).tolist() for i in range(len(corpus))] == DOCUMENTS
    assert corpus.read(2, 1, 3).tolist() == [10, 11]


def test_dtype_follows_megatron() -> None:
    assert token_dtype(259) is np.uint16
    assert token_dtype(65499) is np.uint16
    assert token_dtype(65500) is np.int32


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", [-1, -2, 2])
def test_every_torn_length_is_refused(make_corpus: MakeCorpus, suffix: str, change: int) -> None:
    prefix = make_corpus("torn", DOCUMENTS)
    path = Path(prefix + suffix)
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * change if change > 0 else content[:change])
    with pytest.raises(
        UserError, match=rf"torn{suffix} holds {len(content) + change} bytes .* torn, prepare"
    ):
        open_corpus(prefix)


def test_foreign_files_are_refused(make_corpus: MakeCorpus) -> None:
    prefix = make_corpus("foreign", DOCUMENTS)
    index = Path(prefix + ".idx")
    content = index.read_bytes()
    index.write_bytes(content[:20])
    with pytest.raises(UserError, match="is not a Megatron index, or is cut off in its header"):
        open_corpus(prefix)
    index.write_bytes(content[:9] + b"\x02" + content[10:])
    with pytest.raises(UserError, match="has version 2 and token type 8"):
        open_corpus(prefix)
    Path(prefix + ".bin").unlink()
    with pytest.raises(UserError, match=r"foreign.bin does not exist"):
        open_corpus(prefix)

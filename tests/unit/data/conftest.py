"""Small corpora for the data tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from k3train.data.indexed import write_index


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[[str, Sequence[Sequence[int]]], str]:
    def make(name: str, documents: Sequence[Sequence[int]]) -> str:
        prefix = tmp_path / name
        np.concatenate([np.array(document, np.uint16) for document in documents]).tofile(f"{prefix}.bin")
        write_index(Path(f"{prefix}.idx"), np.array([len(d) for d in documents], np.int32), np.uint16)
        return str(prefix)

    return make

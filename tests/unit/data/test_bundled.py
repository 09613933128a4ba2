"""The standard library as a corpus: disjoint, decodable, capped, built once."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from k3train.config import DataConfig
from k3train.data.bundled import bundled_corpus, is_validation
from k3train.data.cache import cache_folder
from k3train.data.datasets import build_datasets
from k3train.data.indexed import IndexedCorpus, open_corpus
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def texts(corpus: IndexedCorpus) -> list[str]:
    found = [corpus.read(i).tolist() for i in range(len(corpus))]
    assert all(ids[-1] == TOKENIZER.eod_id and TOKENIZER.eod_id not in ids[:-1] for ids in found)
    return [TOKENIZER.decode(ids) for ids in found]


def test_split_is_by_file_and_disjoint(cache: str) -> None:
    train, valid = (texts(open_corpus(prefix)) for prefix in bundled_corpus(TOKENIZER, cache))
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "os.py").read_text(encoding="utf-8") in (valid if is_validation("os.py") else train)
    assert not {text for text in train if len(text) > 200} & set(valid)
    assert 0.02 < len(valid) / (len(train) + len(valid)) < 0.10
    share = sum(map(len, valid)) / sum(map(len, train + valid))
    assert 0.02 < share < 0.10


def test_split_of_known_files_never_changes() -> None:
    names = ("os.py", "json/decoder.py", "idlelib/pyshell.py", "socket.py", "ast.py")
    assert [is_validation(name) for name in names] == [True, False, True, False, False]


def test_cap_takes_a_prefix(cache: str) -> None:
    whole, capped = bundled_corpus(TOKENIZER, cache), bundled_corpus(TOKENIZER, cache, 100_000)
    sizes = []
    for large, small in zip(map(open_corpus, whole), map(open_corpus, capped), strict=True):
        assert texts(small)[:-1] == texts(large)[: len(small) - 1]
        sizes.append(sum(len(text.encode()) for text in texts(small)))
    assert 94_990 < sizes[0] <= 95_000 and 4_990 < sizes[1] <= 5_000
    with pytest.raises(UserError, match=r"data.max_bytes=5"):
        bundled_corpus(TOKENIZER, cache, 5)


def test_torn_cache_is_built_again(tmp_path: Path) -> None:
    train, _ = bundled_corpus(TOKENIZER, str(tmp_path), 20_000)
    path = Path(f"{train}.bin")
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    assert bundled_corpus(TOKENIZER, str(tmp_path), 20_000)[0] == train
    assert path.read_bytes() == content


def test_processes_that_race_agree(tmp_path: Path) -> None:
    code = (
        "import sys; from k3train.data.bundled import bundled_corpus; "
        "from k3train.data.tokenizer import ByteTokenizer; "
        f"print(*bundled_corpus(ByteTokenizer(), {str(tmp_path)!r}))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(answers) == 1
    train = answers.pop().decode().split()[0]
    info = json.loads(Path(f"{train}.json").read_text())
    assert open_corpus(train).num_tokens == info["tokens"] > 1_000_000
    assert not list((tmp_path / "bundled").glob(".building-*"))


def test_unwritable_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"set data.cache_dir or \$K3TRAIN_CACHE"):
        cache_folder(str(tmp_path / "file" / "below"))
    monkeypatch.setenv("K3TRAIN_CACHE", str(tmp_path / "named"))
    assert cache_folder(None) == tmp_path / "named"


def test_build_datasets(cache: str, make_corpus: Callable[[str, list[list[int]]], str]) -> None:
    data = DataConfig(cache_dir=cache)
    train, valid = build_datasets(data, TOKENIZER, 64, 7, 10, 4)
    longer, none = build_datasets(data, TOKENIZER, 64, 7, 1000, 0)
    assert valid is not None and none is None and (len(train), len(valid)) == (10, 4)
    # A run that is extended sees the same data as one that was longer from the start.
    assert all((train[i]["tokens"] == longer[i]["tokens"]).all() for i in range(10))
    with pytest.raises(IndexError):
        train[10]

    data = DataConfig(source="indexed")
    with pytest.raises(UserError, match=r"data.train is empty"):
        build_datasets(data, TOKENIZER, 64, 7, 10, 4)
    data.train = [make_corpus("a", [[1] * 300]), make_corpus("b", [[2] * 100])]
    with pytest.raises(UserError, match=r"data.valid is empty"):
        build_datasets(data, TOKENIZER, 64, 7, 10, 4)
    train, _ = build_datasets(data, TOKENIZER, 8, 7, 400, 0)
    assert sum(int(train[i]["tokens"][0]) == 1 for i in range(400)) == 300
    for weights, message in (
        ([1.0], "1 numbers for 2"),
        ([1.0, 0.0], "holds 0.0"),
        ([1.0, float("nan")], "nan"),
    ):
        data.train_weights = weights
        with pytest.raises(UserError, match=message):
            build_datasets(data, TOKENIZER, 8, 7, 10, 0)

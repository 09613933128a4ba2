"""Preparing a corpus: order, formats, resumption, kills, and one clear line for each bad input."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from k3train.data import prepare as module
from k3train.data.cache import file_lock
from k3train.data.indexed import open_corpus
from k3train.data.prepare import prepare
from k3train.data.sources import cut, read_documents
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError

SHARD = 2000


def line(text: Any) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def text_of(number: int) -> str:
    return f"document {number} é " + "x" * (number * 37 % 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """120 documents in every format, named so that sorting gives their order."""
    source = tmp_path / "in"
    (source / "e").mkdir(parents=True)
    parts = [[text_of(i) for i in range(first, first + 30)] for first in range(0, 90, 30)]
    (source / "a.jsonl").write_bytes(b"\n".join(line(text)[:-1] for text in parts[0]))
    (source / "b.jsonl.gz").write_bytes(
        gzip.compress(b"".join(map(line, parts[1][:9]))) + gzip.compress(b"".join(map(line, parts[1][9:])))
    )
    (source / "c.jsonl.zst").write_bytes(zstandard.compress(b"".join(map(line, parts[2]))))
    table = pyarrow.table({"other": list(range(29)), "text": [text_of(i) for i in range(90, 119)]})
    pyarrow.parquet.write_table(table, source / "d.parquet", row_group_size=10)
    (source / "e" / "one.txt").write_text(text_of(119), encoding="utf-8")
    (source / "notes.md").write_text("not an input")
    return source


def run(inputs: Path | list[str], prefix: Path, workers: int = 1, **options: Any) -> module.PreparedInfo:
    names = [str(inputs)] if isinstance(inputs, Path) else inputs
    options = {"shard_bytes": SHARD, "progress": False} | options
    return prepare(names, str(prefix), "byte", workers=workers, **options)


def contents(prefix: Path) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")}


def leftovers(prefix: Path) -> list[str]:
    return sorted(path.name for path in prefix.parent.glob(f"{prefix.name}*"))


def test_every_format_in_order(folder: Path, tmp_path: Path) -> None:
    info = run(folder, tmp_path / "out")
    corpus = open_corpus(str(tmp_path / "out"))
    expected = [text_of(i) for i in range(120)]
    assert [ByteTokenizer().decode(corpus.read(i)[:-1].tolist()) for i in range(len(corpus))] == expected
    assert all(corpus.read(i)[-1] == ByteTokenizer.eod_id for i in range(len(corpus)))
    num_bytes = sum(len(text.encode()) for text in expected)
    assert (info.documents, info.bytes, info.tokens, info.dtype) == (
        120,
        num_bytes,
        num_bytes + 120,
        "uint16",
    )
    described = json.loads((tmp_path / "out.json").read_text())
    assert (described["tokenizer"], described["vocab_size"], described["tokens"]) == (
        "byte",
        263,
        info.tokens,
    )
    assert leftovers(tmp_path / "out") == ["out.bin", "out.idx", "out.json"]
    assert "120 documents" in str(info)


def test_workers_and_shards_leave_the_files_alone(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "one")
    run(folder, tmp_path / "two", workers=2)
    run(folder, tmp_path / "whole", shard_bytes=1 << 20)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "whole")


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 64, 10_000])
def test_byte_ranges_give_each_line_once(tmp_path: Path, piece_bytes: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([line("one")[:-1], b"", line("two é")[:-1], b"   ", line("three")]))
    pieces = cut(path, piece_bytes)
    documents = [text for piece in pieces for text, _ in read_documents(piece, "text")]
    assert documents == ["one", "two é", "three"]


def test_globs_and_order_of_inputs(folder: Path, tmp_path: Path) -> None:
    run([str(folder / "e"), str(folder / "[ab].*")], tmp_path / "out")
    corpus = open_corpus(str(tmp_path / "out"))
    first = [ByteTokenizer().decode(corpus.read(i).tolist()).split()[1] for i in (0, 1, 60)]
    assert (len(corpus), first) == (61, ["119", "0", "59"])


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line("") + line("x") + line(""))
    info = run(tmp_path / "a.jsonl", tmp_path / "out")
    assert (info.documents, info.tokens, info.empty) == (1, 2, 2)
    assert "2 empty ones left out" in str(info)


class Broken(Exception):
    pass


def failing(after: int, seen: list[int]) -> Callable[..., None]:
    real = module.build_part

    def build(job: Any, shard: Any, progress: Any) -> None:
        if len(seen) == after:
            raise Broken
        seen.append(shard.number)
        real(job, shard, progress)

    return build


def test_continues_after_a_break(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, tmp_path / "straight")
    out = tmp_path / "out"
    first: list[int] = []
    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(module, "build_part", failing(3, first))
        run(folder, out)
    assert leftovers(out) == ["out.parts"]
    # A part that was cut off is not taken for whole.
    part = out.with_suffix(".parts") / "000001.bin"
    part.write_bytes(part.read_bytes()[:-1])
    second: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "build_part", failing(-1, second))
        run(folder, out)
    assert first == [0, 1, 2] and second[:2] == [1, 3] and not {0, 2} & set(second)
    assert contents(out) == contents(tmp_path / "straight")
    assert leftovers(out) == ["out.bin", "out.idx", "out.json"]


def test_parts_of_other_inputs_are_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(module, "build_part", failing(3, []))
        run(folder, out)
    (folder / "a.jsonl").write_bytes(line("changed"))
    run(folder, out)
    assert ByteTokenizer().decode(open_corpus(str(out)).read(0).tolist()) == "changed"


def test_finished_work_is_kept_and_other_work_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    info = run(folder, out)
    stamp = Path(f"{out}.bin").stat().st_mtime_ns
    assert run(folder, out) == info
    assert Path(f"{out}.bin").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="other inputs or settings; choose another prefix, or --no-resume"):
        run(folder / "a.jsonl", out)
    assert run(folder / "a.jsonl", out, resume=False).documents == 30
    assert len(open_corpus(str(out))) == 30
    Path(f"{out}.json").unlink()
    with pytest.raises(UserError, match="exists, made elsewhere"):
        run(folder, out)


def test_one_writer_at_a_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out.parts").mkdir()
    with file_lock(tmp_path / "out.parts" / "lock"), pytest.raises(UserError, match="is in use"):
        run(folder, tmp_path / "out")
    assert run(folder, tmp_path / "out").documents == 120


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.timeout(180)
def test_kill_nine_then_continue(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(line(text_of(i)) for i in range(60_000)))
    out = tmp_path / "out"
    command = (
        "from k3train.data.prepare import prepare\n"
        "if __name__ == '__main__':\n"
        f"    prepare([{str(source)!r}], {str(out)!r}, 'byte', workers=2, progress=False, "
        "shard_bytes=100_000)"
    )
    script = tmp_path / "script.py"
    script.write_text(command)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment)
    parts = out.with_suffix(".parts")
    deadline = time.monotonic() + 60
    while len(list(parts.glob("0*.json"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "killed before it was done"
    assert not Path(f"{out}.idx").exists() and not Path(f"{out}.bin").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in parts.glob("0*.json")}
    assert len(finished) >= 2
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers), "workers outlive their parent"

    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "build_part", failing(-1, seen))
        run([str(source)], out, shard_bytes=100_000)
    assert not {int(name[:6]) for name in finished} & set(seen)
    run([str(source)], tmp_path / "straight", shard_bytes=100_000)
    assert contents(out) == contents(tmp_path / "straight")


def jsonl(*lines: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "bad.jsonl"
        path.write_bytes(b"".join(lines))
        return path

    return write


def compressed(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def parquet(**columns: list[Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "bad.parquet", row_group_size=2)
        return folder / "bad.parquet"

    return write


MANY = b"".join(line(f"{i} {i * 7919 % 1009}") for i in range(3000))
GOOD = line("x" * 900)
BAD_INPUTS = {
    "json": (jsonl(GOOD, b"\n", b'{"text": \n'), "bad.jsonl, line 3: not valid JSON"),
    "json far in": (jsonl(*[GOOD] * 9, b"{]\n"), "bad.jsonl, line 10: not valid JSON"),
    "not an object": (jsonl(GOOD, b"[1]\n"), "line 2: holds a list, not an object with a 'text' key"),
    "key": (jsonl(GOOD, b'{"txt": "a", "id": 3}\n'), "line 2: no key 'text'; its keys: 'txt', 'id'"),
    "number": (jsonl(line(3)), "line 1: 'text' holds int, not a string"),
    "bytes": (jsonl(GOOD, b'{"text": "\xff"}\n'), "line 2: byte 11 is not UTF-8"),
    "surrogate": (
        jsonl(b'{"text": "ab\\ud800"}\n'),
        "line 1: 'text' holds half a surrogate pair at character 3",
    ),
    "txt": (compressed("bad.txt", b"a\nb\xe9\n"), "bad.txt, line 2: byte 4 of the file is not UTF-8"),
    "gz cut": (compressed("a.jsonl.gz", gzip.compress(MANY)[:-9]), "the compressed file ends early"),
    "gz damaged": (compressed("a.jsonl.gz", b"junk"), "a.jsonl.gz, line 1: the compressed file is damaged"),
    "txt.gz cut": (
        compressed("a.txt.gz", gzip.compress(MANY)[:-1]),
        "a.txt.gz: the compressed file ends early",
    ),
    "zst cut": (compressed("a.jsonl.zst", zstandard.compress(MANY)[:-3]), "the compressed file ends early"),
    "zst damaged": (compressed("a.jsonl.zst", b"junk junk"), "line 1: the compressed file is damaged"),
    "column": (parquet(body=["a"]), "bad.parquet: no column 'text'; its columns: 'body'"),
    "null": (parquet(text=["a", "b", "c", None]), "bad.parquet, row 4: 'text' holds NoneType, not a string"),
    "parquet cut": (compressed("a.parquet", b"PAR1 junk"), "a.parquet: not a whole parquet file"),
    "kind": (compressed("a.csv", b"x"), "a.csv: unknown kind of file; valid: .jsonl or .txt"),
    "nothing": (jsonl(line(""), b"\n"), "the inputs hold no text"),
}


@pytest.mark.parametrize(
    ("case", "workers"), [*((case, 1) for case in BAD_INPUTS), ("json far in", 2), ("null", 2)]
)
def test_bad_inputs(tmp_path: Path, case: str, workers: int) -> None:
    write, message = BAD_INPUTS[case]
    out = tmp_path / "out"
    with pytest.raises(UserError) as refused:
        run(write(tmp_path), out, workers=workers)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not {"out.bin", "out.idx", "out.json"} & set(leftovers(out))


def test_first_bad_line_wins_over_workers(tmp_path: Path) -> None:
    lines = [line("y" * 90) for _ in range(400)]
    lines[150] = lines[390] = b"{\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    for _ in range(2):
        with pytest.raises(UserError, match=r"a.jsonl, line 151"):
            run(tmp_path / "a.jsonl", tmp_path / "out", workers=2)


def test_bad_arguments(folder: Path, tmp_path: Path) -> None:
    def refuse(message: str, inputs: list[str], prefix: Path = tmp_path / "out", **options: Any) -> None:
        with pytest.raises(UserError, match=message):
            run(inputs, prefix, **options)

    a = str(folder / "a.jsonl")
    refuse("does not exist, and as a glob matches no .jsonl", [str(folder / "absent*.jsonl")])
    refuse("is named twice", [a, str(folder)])
    refuse("no input: name a file", [])
    refuse("workers=0; valid: 1 or more", [a], workers=0)
    refuse("is a folder; name files in it", [a], prefix=tmp_path)
    (tmp_path / "plain").write_text("")
    refuse("plain", [a], prefix=tmp_path / "plain" / "out")
    (tmp_path / "none").mkdir()
    refuse("none holds no .jsonl", [str(tmp_path / "none")])


def test_an_input_that_changes_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.run_shards

    def meddle(*arguments: Any) -> None:
        real(*arguments)
        with (folder / "a.jsonl").open("ab") as stream:
            stream.write(b"\n" + line("late"))

    monkeypatch.setattr(module, "run_shards", meddle)
    with pytest.raises(UserError, match="an input changed while it was read"):
        run(folder, tmp_path / "out")
    assert leftovers(tmp_path / "out") == ["out.parts"]


def test_progress_counts_every_byte(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".jsonl", ".gz", ".txt"))
    run(
        [str(folder / "a.jsonl"), str(folder / "b.jsonl.gz"), str(folder / "e")],
        tmp_path / "out",
        progress=True,
    )
    shown = capsys.readouterr().out
    assert f"{sizes / 1000:.1f}/{sizes / 1000:.1f} kB" in shown and "tokens" in shown

"""Documents from text files: .jsonl and .txt (plain, .gz, .zst) and .parquet, read in pieces.

A piece is what one worker reads without the rest: a byte range of a plain .jsonl, row groups of a
.parquet, or a whole file. Every error names the file and the line or row.
"""

from __future__ import annotations

import glob
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError

KINDS = {".jsonl": "jsonl", ".txt": "txt", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
VALID = ".jsonl or .txt (also .gz, .zst), or .parquet"
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Part of one input: bytes [start, stop) of a plain .jsonl or whole file, row groups of a .parquet."""

    path: str
    kind: str
    start: int
    stop: int
    size: int
    """Bytes on disk that this piece stands for."""


def find_inputs(inputs: Iterable[str]) -> list[Path]:
    """The files that `inputs` (files, folders, globs) name, in the order given, sorted within each.

    Raises:
        UserError: nothing matches, a file is of an unknown kind, or a file is named twice.
    """
    files: list[Path] = []
    for name in inputs:
        files.extend(_expand(name))
    if not files:
        raise UserError(f"no input: name a file, a folder or a glob of {VALID}")
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; to repeat a corpus, give it a larger weight in training")
        seen.add(path.resolve())
    return files


def cut(path: Path, piece_bytes: int) -> list[Piece]:
    """Cut one file into pieces of about `piece_bytes`, where its format allows."""
    kind, size = file_kind(path), path.stat().st_size
    assert kind is not None
    if kind == "parquet":
        return _cut_parquet(path, piece_bytes)
    if kind == "jsonl" and path.suffix not in COMPRESSIONS:
        starts = range(0, size, piece_bytes)
        return [
            Piece(str(path), kind, start, min(start + piece_bytes, size), min(piece_bytes, size - start))
            for start in starts
        ]
    return [Piece(str(path), kind, 0, size, size)]


def read_documents(piece: Piece, text_key: str) -> Iterator[tuple[str, int]]:
    """Documents of a piece: (text, bytes on disk read so far).

    Raises:
        UserError: a line or row is not what it should be, or the file is cut off.
    """
    try:
        yield from READERS[piece.kind](piece, text_key)
    except (EOFError, zlib.error) as error:
        raise UserError(f"{piece.path}: {error}") from error
    except OSError as error:
        raise UserError(f"{piece.path}: cannot be read: {error.strerror or error}") from error


def file_kind(path: Path) -> str | None:
    """jsonl, txt or parquet; None for anything else."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        kind = KINDS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if kind == "parquet" else kind
    return KINDS.get(suffixes[-1]) if suffixes else None


def _expand(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        if file_kind(path) is None:
            raise UserError(f"{path}: unknown kind of file; valid: {VALID}")
        return [path]
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    files = sorted(entry for entry in found if entry.is_file() and file_kind(entry))
    if not files:
        state = "holds no" if path.is_dir() else "does not exist, and as a glob matches no"
        raise UserError(f"{name} {state} {VALID}")
    return files


def _cut_parquet(path: Path, piece_bytes: int) -> list[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a whole parquet file: {error}") from error
    pieces: list[Piece] = []
    first = size = 0
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        size += sum(columns.column(i).total_compressed_size for i in range(columns.num_columns))
        if size >= piece_bytes or group == metadata.num_row_groups - 1:
            pieces.append(Piece(str(path), "parquet", first, group + 1, size))
            first, size = group + 1, 0
    return pieces


def _read_jsonl(piece: Piece, text_key: str) -> Iterator[tuple[str, int]]:
    with open(piece.path, "rb") as raw:
        stream = _decoded(piece.path, raw)
        position = piece.start
        if piece.start:
            # The line that crosses the border belongs to the piece it begins in.
            raw.seek(piece.start - 1)
            position += len(raw.readline()) - 1
        number = 0
        try:
            while stream is not raw or position < piece.stop:
                line = stream.readline()
                if not line:
                    break
                number += 1
                position = raw.tell() if stream is not raw else position + len(line)
                if not line.isspace():
                    yield _json_text(line, text_key), position - piece.start
        except (UserError, EOFError) as error:
            line_number = _lines_before(piece) + number + isinstance(error, EOFError)
            raise UserError(f"{piece.path}, line {line_number}: {error}") from error


def _json_text(line: bytes, text_key: str) -> str:
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start + 1} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}") from error
    if not isinstance(entry, dict):
        raise UserError(f"holds a {type(entry).__name__}, not an object with a {text_key!r} key")
    if text_key not in entry:
        keys = ", ".join(map(repr, list(entry)[:8])) or "none"
        raise UserError(f"no key {text_key!r}; its keys: {keys}; choose one as text_key")
    return _checked_text(entry[text_key], text_key)


def _checked_text(text: Any, text_key: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{text_key!r} holds {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{text_key!r} holds half a surrogate pair at character {error.start + 1}") from error
    return text


def _lines_before(piece: Piece) -> int:
    """Lines that begin ahead of the first one this piece yields; counted only to word an error."""
    count, left = 0, piece.start
    if not left:
        return 0
    with open(piece.path, "rb") as stream:
        last = b"\n"
        while left:
            block = stream.read(min(left, READ_BYTES))
            count += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return count + (last != b"\n")


def _read_txt(piece: Piece, text_key: str) -> Iterator[tuple[str, int]]:
    with open(piece.path, "rb") as raw:
        content = _decoded(piece.path, raw).read()
    try:
        yield content.decode("utf-8-sig"), piece.size
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place = f"{piece.path}, line {line}"
        raise UserError(f"{place}: byte {error.start + 1} of the file is not UTF-8") from error


def _read_parquet(piece: Piece, text_key: str) -> Iterator[tuple[str, int]]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(piece.path) as table:
            if text_key not in table.schema_arrow.names:
                names = ", ".join(map(repr, table.schema_arrow.names[:8]))
                raise UserError(f"no column {text_key!r}; its columns: {names}; choose one as text_key")
            groups = list(range(piece.start, piece.stop))
            row = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
            last = row + sum(table.metadata.row_group(group).num_rows for group in groups)
            total = last - row
            for batch in table.iter_batches(1024, row_groups=groups, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    done = piece.size * (total - last + row) // total
                    yield _checked_text(text, text_key), done
    except UserError as error:
        place = f", row {row}" if row else ""
        raise UserError(f"{piece.path}{place}: {error}") from error
    except pyarrow.ArrowException as error:
        raise UserError(f"{piece.path}: not a whole parquet file, after row {row}: {error}") from error


READERS: dict[str, Callable[[Piece, str], Iterator[tuple[str, int]]]] = {
    "jsonl": _read_jsonl,
    "txt": _read_txt,
    "parquet": _read_parquet,
}


def _decoded(path: str, raw: BinaryIO) -> BinaryIO | io.BufferedReader:
    if path.endswith(".gz"):
        return io.BufferedReader(_Inflated(raw, lambda: zlib.decompressobj(31)), READ_BYTES)
    if path.endswith(".zst"):
        import zstandard

        return io.BufferedReader(_Inflated(raw, zstandard.ZstdDecompressor().decompressobj), READ_BYTES)
    return raw


class _Inflated(io.RawIOBase):
    """Decompressed bytes of a .gz or .zst of any number of members; a stream that ends early is an error."""

    def __init__(self, raw: BinaryIO, new_member: Callable[[], Any]) -> None:
        self.raw = raw
        self.new_member = new_member
        self.member: Any = None
        self.compressed = b""
        self.output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.output:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self.output))
        buffer[:count] = self.output[:count]
        self.output = self.output[count:]
        return count

    def _fill(self) -> bool:
        self.compressed = self.compressed or self.raw.read(READ_BYTES)
        if not self.compressed:
            if self.member is not None:
                raise EOFError("the compressed file ends early")
            return False
        self.member = self.member or self.new_member()
        self.output = memoryview(self._decompress())
        self.compressed = b""
        if self.member.eof:
            self.compressed = self.member.unused_data
            self.member = None
        return True

    def _decompress(self) -> bytes:
        import zstandard

        try:
            return self.member.decompress(self.compressed)
        except (zlib.error, zstandard.ZstdError) as error:
            raise EOFError(f"the compressed file is damaged: {error}") from error

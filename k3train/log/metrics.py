"""`metrics.jsonl`: one JSON object a line, one line a step, floats in full precision.

JSON has no NaN or Infinity; they are written as the strings "NaN", "Infinity" and "-Infinity", which any
JSON parser reads and which `read` turns back into floats.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"
NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MAX_PENDING = 100_000


class MetricsLog:
    """Appends to a run's `metrics.jsonl`."""

    def __init__(self, run_dir: str | os.PathLike[str], *, resume_step: int) -> None:
        """Open for appending, without the lines of steps after `resume_step` and without a torn last line.

        The file is replaced in one rename, so that a crash here leaves the old or the new one. Raises
        OSError where the directory cannot be written.
        """
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(self.path, resume_step)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line and hand it to the operating system before returning.

        A line that cannot be written (OSError, as on a full disk) leaves no torn bytes behind, is kept in
        memory, and goes out ahead of the next one.
        """
        self._pending.append(encode(step, metrics))
        while self._pending:
            append_whole(self._file.fileno(), self._pending[0])
            self._pending.popleft()

    def close(self) -> None:
        """Try the pending lines once more and close. Raises OSError if they still cannot be written."""
        try:
            while self._pending:
                append_whole(self._file.fileno(), self._pending[0])
                self._pending.popleft()
        finally:
            self._file.close()


def append_whole(descriptor: int, line: bytes) -> None:
    """Append `line` to the file, or nothing of it. Raises OSError."""
    size = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, line)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    if written < len(line):
        os.ftruncate(descriptor, size)
        raise OSError(f"only {written} of {len(line)} bytes could be written")


def encode(step: int, metrics: Mapping[str, Any]) -> bytes:
    """One line of the file. Scalars of array libraries are taken through their `item()`."""
    record = {"step": step} | {name: plain(value) for name, value in metrics.items() if name != "step"}
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def plain(value: Any) -> Any:
    """`value` as JSON can hold it; floats keep every bit."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of one line, or None when the line is torn or not a record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {
        name: NONFINITE.get(value, value) if isinstance(value, str) else value
        for name, value in record.items()
    }


def whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every complete line and its record."""
    with open(path, "rb") as file:
        for line in file:
            record = decode(line) if line.endswith(b"\n") else None
            if record is not None:
                yield line, record


def truncate_after(path: Path, step: int) -> None:
    """Keep the complete lines up to and including `step`, byte for byte."""
    if not path.exists():
        return
    kept = b"".join(line for line, record in whole_lines(path) if record["step"] <= step)
    if len(kept) == path.stat().st_size:
        return
    replace_file(path, kept)


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` in place of `path` so that a reader, or a crash, sees the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a run in file order; empty when there is no file. Torn lines are left out."""
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return []
    return [record for _, record in whole_lines(path)]

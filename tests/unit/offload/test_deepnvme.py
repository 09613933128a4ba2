"""The adapter to DeepSpeed's extension, against a stand-in with its calls; it is never built here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from offload.files import deepnvme
from offload.files.alignment import ALIGNMENT
from offload.files.engine import ThreadEngine, aligned_bytes, default_engine


class Handle:
    """Does everything at `wait`, and counts what it did."""

    def __init__(self, block_size: int, depth: int, single: bool, overlap: bool, parallel: int) -> None:
        self.queue: list[Any] = []

    def async_pwrite(self, memory: torch.Tensor, path: str, offset: int) -> int:
        self.queue.append(("write", memory, path, offset))
        return 0

    def async_pread(self, memory: torch.Tensor, path: str, offset: int) -> int:
        self.queue.append(("read", memory, path, offset))
        return 0

    def wait(self) -> int:
        done, self.queue = self.queue, []
        for kind, memory, path, offset in done:
            with open(path, "r+b") as file:
                file.seek(offset)
                if kind == "write":
                    file.write(memory.numpy().tobytes())
                else:
                    file.readinto(memory.numpy())
        return len(done)


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deepspeed.ops.aio.async_io_op")
    module.aio_handle = Handle  # type: ignore[attr-defined]
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.aio"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_bytes_come_back_from_a_file_without_a_name(extension: None, tmp_path: Path) -> None:
    assert deepnvme.why_not() is None
    engine = deepnvme.DeepNvmeEngine()
    file = engine.open(tmp_path)
    os.posix_fallocate(file, 0, 4 * ALIGNMENT)
    memory, back = aligned_bytes(2 * ALIGNMENT).random_(0, 255), aligned_bytes(2 * ALIGNMENT)
    first = engine.write(file, ALIGNMENT, memory)
    second = engine.write(file, 0, memory[:ALIGNMENT])
    second.wait()
    first.wait()
    engine.read(file, ALIGNMENT, back).wait()
    assert torch.equal(memory, back) and list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="shorter than what was written"):
        engine.read(file, 3 * ALIGNMENT, back)
    engine.close(file)


def test_threads_stand_in_where_it_was_not_built() -> None:
    reason = deepnvme.why_not()
    assert reason is not None and "deepspeed" in reason
    assert isinstance(default_engine(), ThreadEngine)

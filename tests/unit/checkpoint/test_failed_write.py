"""A file that cannot be written is an error of that save, and nothing that crashes the process later."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import pytest

from parallel.cpu import enable_cpu

enable_cpu()

from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType  # noqa: E402

from k3train.checkpoint.shards import ShardWriter, _Snapshot  # noqa: E402


def views() -> int:
    return sum(type(each) is memoryview for each in gc.get_objects())


def test_a_full_disk_leaves_no_view_of_what_was_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 0)
    writer.begin()
    item = WriteItem(MetadataIndex("state"), WriteItemType.BYTE_IO)
    writer._snapshot = _Snapshot(tmp_path, copy=False)
    content = (item, io.BytesIO(b"x" * (1 << 20)))
    writer._snapshot.bucket = (Path("/dev/full"), "shard", ([content], []))
    # Views that hang in a cycle until they are collected crash CPython 3.12.1 when they are.
    gc.disable()
    try:
        before = views()
        with pytest.raises(OSError, match="No space left on device"):
            writer.write()
        assert views() == before
    finally:
        gc.enable()
    assert "No space left" in (tmp_path / "rank-00000.failed").read_text()

"""Vectors on shelves, and every way in which a disk may fail under them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.files.alignment import ALIGNMENT
from offload.files.engine import BLOCK, ThreadEngine, aligned_bytes
from offload.files.sealed import checksum
from offload.gradients import ShelvedGradients
from offload.shelf import BUFFERS, FileShelf, HostShelf
from tests.unit.offload.faults import Faulty

SIZES = (10, 5000, 1024, 77, 3000, 2048, 1)


def shelf(folder: Path, engine: ThreadEngine, told: list[str], *, fallback: bool = True) -> FileShelf:
    return FileShelf(folder, engine, pinned=False, fallback=fallback, warn=told.append)


def vector(key: int, round_: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + key)
    return torch.randn(SIZES[key], generator=generator)


def write_all(kept: FileShelf | HostShelf, round_: int) -> None:
    for key in range(len(SIZES)):
        kept.blank(key).copy_(vector(key, round_))
        kept.commit(key)


def assert_all(kept: FileShelf | HostShelf, round_: int) -> None:
    for key in reversed(range(len(SIZES))):
        kept.request(key)
        assert torch.equal(kept.open(key), vector(key, round_)), (key, round_)
        kept.release(key)


def reserved(kept: FileShelf | HostShelf) -> FileShelf | HostShelf:
    for key, numel in enumerate(SIZES):
        kept.reserve(key, numel)
    return kept


@pytest.mark.parametrize("direct", [True, False])
def test_vectors_come_back_through_few_buffers(direct: bool, tmp_path: Path) -> None:
    told: list[str] = []
    kept = shelf(tmp_path, ThreadEngine(direct=direct), told)
    reserved(kept)
    for round_ in range(3):
        write_all(kept, round_)
        assert_all(kept, round_)
    kept.open(1).add_(1)
    kept.commit(1)
    kept.flush()
    assert torch.equal(kept.open(1), vector(1, 2) + 1)
    assert told == [] and len(kept._buffers) == BUFFERS < len(SIZES)
    assert list(tmp_path.iterdir()) == [], "the file has no name that another run could find"


def test_an_open_vector_is_not_given_away(tmp_path: Path) -> None:
    kept = shelf(tmp_path, ThreadEngine(), [])
    reserved(kept)
    write_all(kept, 0)
    held = kept.open(0)
    for key in range(1, len(SIZES)):
        assert torch.equal(kept.open(key), vector(key, 0))
        kept.release(key)
    assert torch.equal(held, vector(0, 0))


def test_a_full_disk_moves_what_is_written_to_the_host_with_one_warning(tmp_path: Path) -> None:
    told: list[str] = []
    engine = Faulty()
    kept = shelf(tmp_path, engine, told)
    reserved(kept)
    write_all(kept, 0)
    kept.flush()
    engine.fail_writes_after = engine.writes + 2
    for round_ in (1, 2):
        write_all(kept, round_)
        assert_all(kept, round_)
    assert len(told) == 1 and "No space left on device" in told[0] and "host memory from now on" in told[0]


def test_the_policy_may_be_to_stop(tmp_path: Path) -> None:
    engine = Faulty()
    kept = shelf(tmp_path, engine, [], fallback=False)
    reserved(kept)
    engine.fail_writes_after = 0
    with pytest.raises(OffloadError, match=r"No space left .*; free it, or set offload\.nvme_dir"):
        write_all(kept, 0)
        kept.flush()


def test_a_disk_without_room_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match="No space left"):
        shelf(tmp_path, ThreadEngine(), [], fallback=False).reserve(0, 10)
    told: list[str] = []
    kept = shelf(tmp_path, ThreadEngine(), told)
    reserved(kept)
    write_all(kept, 0)
    assert_all(kept, 0)
    assert len(told) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    told: list[str] = []
    kept = shelf(blocked, ThreadEngine(), told)
    reserved(kept)
    write_all(kept, 0)
    assert_all(kept, 0)
    assert len(told) == 1
    with pytest.raises(OffloadError, match="File exists"):
        shelf(blocked, ThreadEngine(), [], fallback=False)


def test_a_deleted_folder_takes_nothing_away(tmp_path: Path) -> None:
    told: list[str] = []
    kept = shelf(tmp_path / "inner", ThreadEngine(), told)
    reserved(kept)
    write_all(kept, 0)
    (tmp_path / "inner").rmdir()
    assert_all(kept, 0)
    write_all(kept, 1)
    assert_all(kept, 1)
    assert told == []


def test_a_lost_write_is_not_read_as_the_old_value(tmp_path: Path) -> None:
    """The old vector is whole, with a right checksum; its generation tells."""
    engine = Faulty()
    kept = shelf(tmp_path, engine, [])
    reserved(kept)
    write_all(kept, 0)
    kept.flush()
    engine.drop_writes = True
    write_all(kept, 1)
    engine.drop_writes = False
    with pytest.raises(OffloadError, match="something else than generation 2 of 0; .* checkpoint is intact"):
        kept.open(0)


def test_another_shelf_s_bytes_are_not_taken(tmp_path: Path) -> None:
    first, second = (shelf(tmp_path, ThreadEngine(direct=False), []) for _ in range(2))
    for kept in (first, second):
        reserved(kept)
        write_all(kept, 0)
        kept.flush()
    assert first._file is not None and second._file is not None
    os.pwrite(first._file, os.pread(second._file, first._end, 0), 0)
    with pytest.raises(OffloadError, match="something else"):
        first.open(0)


@pytest.mark.parametrize("what", ["flipped bit", "cut short"])
def test_damage_is_found(what: str, tmp_path: Path) -> None:
    kept = shelf(tmp_path, ThreadEngine(direct=False), [])
    reserved(kept)
    write_all(kept, 0)
    kept.flush()
    assert kept._file is not None
    place = kept._entries[1].offset + ALIGNMENT + 8
    if what == "flipped bit":
        (byte,) = os.pread(kept._file, 1, place)
        os.pwrite(kept._file, bytes([byte ^ 1]), place)
    else:
        os.ftruncate(kept._file, place)
    problem = "checksum of 1 does not match" if what == "flipped bit" else "shorter than what was written"
    with pytest.raises(OffloadError, match=problem):
        kept.open(1)


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    lengths: list[int] = []

    def short(file: int, view: memoryview, offset: int) -> int:
        lengths.append(len(view))
        return pwrite(file, view if len(view) == ALIGNMENT else view[: len(view) // 2 + 100], offset)

    engine = ThreadEngine(direct=False)
    file = engine.open(tmp_path)
    memory = aligned_bytes(2 * BLOCK)
    memory.random_(0, 255)
    monkeypatch.setattr(os, "pwrite", short)
    engine.write(file, 0, memory[: BLOCK + 8 * ALIGNMENT]).wait()
    monkeypatch.undo()
    assert len(lengths) > 4 and min(lengths) < BLOCK
    back = aligned_bytes(BLOCK + 8 * ALIGNMENT)
    engine.read(file, 0, back).wait()
    assert torch.equal(back, memory[: len(back)])
    monkeypatch.setattr(os, "pwrite", lambda *args: 0)
    with pytest.raises(OSError, match="No space left"):
        engine.write(file, 0, memory).wait()


def test_a_slow_disk_only_takes_longer(tmp_path: Path) -> None:
    engine = Faulty()
    engine.delay = 0.01
    kept = shelf(tmp_path, engine, [])
    reserved(kept)
    write_all(kept, 0)
    assert_all(kept, 0)


def test_a_checksum_sees_swapped_blocks() -> None:
    blocks = torch.arange(2 * ALIGNMENT, dtype=torch.int64).remainder(251).to(torch.uint8)
    swapped = torch.cat([blocks[ALIGNMENT:], blocks[:ALIGNMENT]])
    assert checksum(blocks) != checksum(swapped)
    assert checksum(blocks) == checksum(blocks.clone())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_gradients_are_summed_in_order_and_scaled_when_fetched(tier: str, tmp_path: Path) -> None:
    kept = HostShelf(pinned=False) if tier == "host" else shelf(tmp_path, ThreadEngine(), [])
    store = ShelvedGradients(kept)
    for key, numel in enumerate(SIZES):
        store.allocate(key, numel, torch.device("cpu"))
    for step in range(2):
        store.reset(range(len(SIZES)))
        for round_ in range(3):
            for key in range(len(SIZES)):
                part = vector(key, 10 * step + round_)
                store.accumulate(key, part).wait()
                part.fill_(float("nan"))
        store.scale([2, 3], 0.3)
        store.scale([3], torch.tensor(3.0))
        for key in range(len(SIZES)):
            out = torch.empty(SIZES[key])
            store.request(key)
            store.fetch(key, out)
            expected = vector(key, 10 * step)
            for round_ in (1, 2):
                expected += vector(key, 10 * step + round_)
            for factor in {2: [0.3], 3: [0.3, 3.0]}.get(key, []):
                expected *= factor
            assert torch.equal(out, expected)
    assert store.moved == {"in": 24 * sum(SIZES), "out": 8 * sum(SIZES)}


def test_a_failure_of_the_disk_reaches_the_training_thread(tmp_path: Path) -> None:
    engine = Faulty()
    store = ShelvedGradients(shelf(tmp_path, engine, [], fallback=False))
    for key, numel in enumerate(SIZES):
        store.allocate(key, numel, torch.device("cpu"))
    engine.fail_writes_after = 0
    with pytest.raises(OffloadError, match="No space left"):
        for key in range(len(SIZES)):
            store.accumulate(key, vector(key, 0)).wait()

"""The NVMe tier on a CPU: parcels come back through few buffers, and every way in which a disk may fail."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.files.alignment import ALIGNMENT
from offload.files.engine import ThreadEngine, Transfer
from offload.tiers import OffloadError, TierFull, host
from offload.tiers.nvme import NvmeTier
from tests.unit.offload.faults import Faulty

CPU = torch.device("cpu")
PIECE = 4 * ALIGNMENT
SIZES = (1, 4096, 5000, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 77)
CAPACITY = 64 * ALIGNMENT
LOST = r"; set offload\.nvme_dir to another disk, .* from its last checkpoint"


def content(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def open_nvme(folder: Path, engine: ThreadEngine | None = None, **options: Any) -> NvmeTier:
    given = {"capacity": CAPACITY, "piece": PIECE, "buffers": 2} | options
    return NvmeTier(folder, device=CPU, engine=lambda: engine or ThreadEngine(), **given)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    made = open_nvme(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("direct", [True, False])
def test_parcels_come_back_through_few_buffers(direct: bool, tmp_path: Path) -> None:
    tier = open_nvme(tmp_path, ThreadEngine(direct=direct))
    for round_ in range(3):
        parcels = [tier.put(content(size, round_)) for size in SIZES]
        for parcel in parcels:
            parcel.wait_stored()
            assert parcel.is_stored() and parcel.source is None
        for index in (6, 0, 5, 1, 4, 2, 3):
            parcels[index].fetch()
        for index in range(len(SIZES)):
            assert torch.equal(parcels[index].take(), content(SIZES[index], round_)), SIZES[index]
        assert tier.used == sum(parcel.nbytes for parcel in parcels) == tier.peak
        for parcel in parcels:
            parcel.free()
            parcel.free()
        assert tier.used == 0
    assert list(tmp_path.iterdir()) == [], "the file has no name that another run could find"
    tier.close()


def test_many_parcels_in_random_order_with_early_frees(tier: NvmeTier) -> None:
    chance, held = random.Random(1), {}
    for seed in range(300):
        size = chance.choice(SIZES)
        try:
            parcel = tier.put(content(size, seed))
        except TierFull:
            pass
        else:
            held[seed] = parcel, size
        if chance.random() < 0.3 and held:
            held[chance.choice(list(held))][0].fetch()
        while len(held) > 6 or (held and chance.random() < 0.5):
            which = chance.choice(list(held))
            parcel, size = held.pop(which)
            if chance.random() < 0.6:
                assert torch.equal(parcel.take(), content(size, which))
            parcel.free()
    for parcel, _ in held.values():
        parcel.free()
    tier.close()
    assert tier.used == 0 and tier.peak <= CAPACITY


class Counting(ThreadEngine):
    """Notes how many reads are under way at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = self.most = 0

    def read(self, file: int, offset: int, memory: Tensor) -> Transfer:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return Counted(self, super().read(file, offset, memory))


class Counted:
    def __init__(self, engine: Counting, transfer: Transfer) -> None:
        self.engine, self.transfer = engine, transfer

    def wait(self) -> None:
        self.transfer.wait()
        self.engine.under_way -= 1


def test_several_reads_are_under_way_in_every_round(tmp_path: Path) -> None:
    engines: list[Counting] = []

    def engine() -> Counting:
        engines.append(Counting())
        return engines[-1]

    tier = NvmeTier(tmp_path, CAPACITY, CPU, engine=engine, piece=ALIGNMENT, buffers=8)
    for round_ in range(3):
        parcel = tier.put(content(20 * ALIGNMENT, round_))
        assert torch.equal(parcel.take(), content(20 * ALIGNMENT, round_))
        parcel.free()
        assert [each.most for each in engines] == [0, 4, 4], (
            "the writer reads nothing, two readers have 4 buffers"
        )
        for each in engines:
            each.most = 0
    tier.close()


def test_a_place_is_not_used_again_while_it_is_written(tmp_path: Path) -> None:
    """A parcel that is freed at once leaves its place when its write has ended."""
    engine = Faulty()
    engine.delay = 0.2
    tier = open_nvme(tmp_path, engine, capacity=6 * ALIGNMENT)
    first = tier.put(content(PIECE, 1))
    first.wait_stored()
    first.free()
    assert tier.used == 0 and not first.written.is_set()
    second = tier.put(content(PIECE, 2))
    assert torch.equal(second.take(), content(PIECE, 2))
    tier.close()


def test_a_full_tier_says_what_to_change(tier: NvmeTier) -> None:
    parcel = tier.put(content(50 * ALIGNMENT))
    with pytest.raises(
        TierFull, match=r"the nvme tier is full: .* bytes are in use.*; raise offload\.nvme_gb"
    ):
        tier.put(content(20 * ALIGNMENT))
    parcel.wait_stored()
    assert torch.equal(parcel.take(), content(50 * ALIGNMENT))


# What a user meets before the first step.


def test_a_directory_below_one_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        OffloadError, match=r"no file can be made in .*No such file .*set offload\.nvme_dir to a folder"
    ):
        open_nvme(tmp_path / "not mounted" / "offload")
    open_nvme(tmp_path / "offload").close()
    assert list(tmp_path.iterdir()) == [tmp_path / "offload"]


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid():
        folder = tmp_path / "closed"
        folder.mkdir(0o500)
    else:
        folder = Path("/sys/kernel")  # not even root makes files there
    with pytest.raises(OffloadError, match=r"no file can be made in .*(denied|permitted).*offload\.nvme_dir"):
        open_nvme(folder)


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="no file can be made in .*File exists"):
        open_nvme(tmp_path / "file")


def test_a_disk_without_room(tmp_path: Path) -> None:
    with pytest.raises(
        OffloadError, match=r"has no room for 9223.* GB: .*; lower offload\.nvme_gb, free some"
    ):
        open_nvme(tmp_path, capacity=(1 << 63) - (1 << 30))


def test_a_small_file_system(tmp_path: Path) -> None:
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("may not mount a file system")
    try:
        with pytest.raises(OffloadError, match="has no room for 0.00 GB: No space left on device"):
            open_nvme(tmp_path)
        open_nvme(tmp_path, capacity=8 * ALIGNMENT).close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_staging_needs_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 1000)
    with pytest.raises(OffloadError, match="the host has 0.0 GB of memory left"):
        open_nvme(tmp_path)


# What a user meets while it runs.


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_disk_that_fills_keeps_what_is_on_the_way(after: int, tmp_path: Path) -> None:
    engine = Faulty()
    engine.fail_writes_after = after
    tier = open_nvme(tmp_path, engine)
    parcels = [tier.put(content(5 * PIECE, 1))]
    parcels[0].wait_stored()
    while tier.failure is None:
        threading.Event().wait(0.001)
    with pytest.raises(
        OffloadError, match=r"the disk under .* failed: No space left on device; free some, or"
    ):
        tier.put(content(10))
    assert torch.equal(parcels[0].take(), content(5 * PIECE, 1))
    parcels[0].free()
    assert tier.used == 0
    tier.close()


def test_or_stops(tmp_path: Path) -> None:
    engine = Faulty()
    engine.fail_writes_after = 1
    tier = open_nvme(tmp_path, engine, keep_failed=False)
    parcel = tier.put(content(5 * PIECE, 1))
    parcel.wait_stored()
    for _ in range(2):
        with pytest.raises(OffloadError, match="No space left on device"):
            parcel.take()
    parcel.free()
    tier.close()
    assert tier.used == 0


def test_a_directory_that_is_removed_while_running(tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    tier = open_nvme(folder)
    before = tier.put(content(PIECE, 1))
    shutil.rmtree(folder)
    after = tier.put(content(PIECE, 2))
    assert torch.equal(before.take(), content(PIECE, 1))
    assert torch.equal(after.take(), content(PIECE, 2))
    tier.close()


def damage(tier: NvmeTier, what: str, offset: int) -> None:
    """Do to the tier's file what a bad disk does."""
    with open(f"/proc/self/fd/{tier.file}", "r+b") as file:
        if what == "cut":
            file.truncate(offset + ALIGNMENT + 10)
            return
        file.seek(offset + (ALIGNMENT + 1000 if what == "bit" else 0))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("bit", r"the checksum of bytes 0 \.\. 16384 of a parcel does not match"),
        ("header", "the file holds something else than generation 1"),
        ("cut", "the file is shorter than what was written to it"),
    ],
)
def test_a_damaged_file_is_an_error_never_wrong_numbers(what: str, problem: str, tmp_path: Path) -> None:
    tier = open_nvme(tmp_path, ThreadEngine(direct=False))
    hurt, well = tier.put(content(2 * PIECE, 1)), None
    hurt.written.wait()
    damage(tier, what, 0)
    if what != "cut":
        well = tier.put(content(PIECE, 2))
    with pytest.raises(OffloadError, match=f"could not be read back: {problem}.*{LOST}"):
        hurt.take()
    if well is not None:
        assert torch.equal(well.take(), content(PIECE, 2))
    hurt.free()
    tier.close()


def test_a_write_that_never_happened_is_found_by_its_generation(tmp_path: Path) -> None:
    engine = Faulty(direct=False)
    tier = open_nvme(tmp_path, engine)
    first = tier.put(content(PIECE, 1))
    first.written.wait()
    first.free()
    engine.drop_writes = True
    second = tier.put(content(PIECE, 1))
    with pytest.raises(OffloadError, match="the file holds something else than generation 2"):
        second.take()
    tier.close()


KILLED = """
import os, pathlib, signal, sys, torch
from offload.tiers.nvme import NvmeTier
folder = pathlib.Path(sys.argv[1])
tier = NvmeTier(folder, 1 << 24, torch.device("cpu"))
parcel = tier.put(torch.ones(1 << 20, dtype=torch.uint8))
parcel.written.wait()
assert os.fstat(tier.file).st_blocks * 512 >= 1 << 24
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_tier_says_of_itself(tier: NvmeTier, tmp_path: Path) -> None:
    assert tier.describe().startswith(f"0.00 GB of a file in {tmp_path} by ThreadEngine")

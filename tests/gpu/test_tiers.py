"""Tiers of saved activations on GPUs: exact bytes beside a busy stream, bounded pinned memory, no waiting."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.tiers import Tier, TierFull, numa, report
from offload.tiers.host import open_host
from offload.tiers.nvme import NvmeTier
from offload.tiers.sizes import stored_bytes
from tests.dist.launch import run_workers, start_workers, stop_workers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
SIZES = (1, 511, 4096, 70_000, MIB, 5 * MIB + 3, 40 * MIB)
SLAB = 16 * MIB
BUSY = 20_000_000
"""Clock cycles, some 10 ms, by which the device is behind the host."""
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1),
    reason="needs two GPUs that reach each other's memory",
)


def content(nbytes: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE, generator=generator)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Torch raises an error where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def opened(name: str, folder: Path) -> Tier:
    if name == "host":
        return open_host(160 * MIB, DEVICE, SLAB)
    return NvmeTier(folder, 160 * MIB, DEVICE)


@pytest.mark.parametrize("name", ["host", "nvme"])
def test_bytes_come_back_beside_a_busy_stream(name: str, tmp_path: Path) -> None:
    """Sources are overwritten and freed behind `wait_stored`, results are checked behind `take`."""
    tier, chance, held = opened(name, tmp_path), random.Random(1), []
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for seed in range(120):
        size = chance.choice(SIZES)
        source = content(size, seed)
        try:
            parcel = tier.put(source)
        except TierFull:
            parcel = None
        else:
            held.append((parcel, size, seed))
        if seed % 7 == 0:
            torch.cuda._sleep(BUSY // 10)
        if parcel is not None:
            parcel.wait_stored()
        source.fill_(0)
        del source
        if chance.random() < 0.4 and held:
            chance.choice(held)[0].fetch()
        while len(held) > 4:
            parcel, size, made = held.pop(chance.randrange(len(held)))
            if chance.random() < 0.8:
                taken = parcel.take()
                wrong += (taken != content(size, made)).sum()
                taken.fill_(1)
                del taken
            parcel.free()
    for parcel, *_ in held:
        parcel.free()
    assert wrong.item() == 0 and tier.used == 0
    tier.close()


def test_the_host_does_not_wait(tmp_path: Path) -> None:
    tier = open_host(64 * MIB, DEVICE)
    tier.put(content(64 * MIB, 0)).free()  # locks the pool
    source = content(32 * MIB, 1)
    torch.cuda.synchronize()
    with no_waiting():
        torch.cuda._sleep(BUSY)
        parcel = tier.put(source)
        stored = parcel.is_stored()
        parcel.wait_stored()
        source.zero_()
        parcel.fetch()
        taken = parcel.take()
        parcel.free()
        idle = torch.cuda.current_stream().query()
    assert not stored and not idle
    assert torch.equal(taken, content(32 * MIB, 1))
    tier.close()


@pytest.mark.parametrize("name", ["host", "nvme"])
def test_nothing_is_allocated_in_steady_state(name: str, tmp_path: Path) -> None:
    tier = opened(name, tmp_path)
    seen: list[tuple[int, int, int]] = []
    for _ in range(4):
        parcels = [tier.put(content(size, size)) for size in SIZES for _ in range(2)]
        for parcel in parcels:
            parcel.wait_stored()
        for parcel in reversed(parcels):
            parcel.take()
            parcel.free()
        torch.cuda.synchronize()
        pool: Any = tier._pool  # type: ignore[attr-defined]
        seen.append((torch.cuda.memory_reserved(), pool.reached, tier.peak))
    assert len(set(seen[1:])) == 1
    assert tier.peak == 2 * sum(stored_bytes(name, size) for size in SIZES)
    tier.close()


class Spy:
    """Passes on to CUDA's runtime, and notes what is locked."""

    def __init__(self) -> None:
        self.real = torch.cuda.cudart()
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        answer = self.real.cudaHostRegister(address, nbytes, flags)
        assert int(answer) == 0
        self.locked[address] = nbytes
        return answer

    def cudaHostUnregister(self, address: int) -> Any:
        answer = self.real.cudaHostUnregister(address)
        assert int(answer) == 0
        del self.locked[address]
        return answer


def test_no_more_is_locked_than_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: spy)
    capacity = 2 * SLAB + 4096
    tier = open_host(capacity, DEVICE, SLAB)
    memory: Any = tier.memory
    parcel = tier.put(content(100, 1))
    memory._slabs[-1].result()
    assert sum(spy.locked.values()) == 2 * SLAB, "one in use, one ahead"
    parcel.free()
    whole = tier.put(content(capacity, 2))
    assert sum(spy.locked.values()) == capacity == len(memory.bytes)
    assert memory.bytes[0].is_pinned() and memory.bytes[capacity - 1].is_pinned()
    assert torch.equal(whole.take(), content(capacity, 2))
    with pytest.raises(TierFull, match="the host tier is full"):
        tier.put(content(1, 1))
    tier.close()
    assert spy.locked == {}


def test_a_fetch_that_nobody_takes_leaves_memory_intact(tmp_path: Path) -> None:
    """Its target is used again by the compute stream, which must be behind the copy."""
    for tier in (opened("host", tmp_path), opened("nvme", tmp_path)):
        parcel = tier.put(content(40 * MIB, 1))
        parcel.wait_stored()
        torch.cuda.synchronize()
        for _ in range(5):
            parcel.fetch()
            other = tier.put(content(MIB, 2))
            parcel.free()
            mine = torch.full((40 * MIB,), 7, dtype=torch.uint8, device=DEVICE)
            torch.cuda.synchronize()
            assert int(mine.min()) == int(mine.max()) == 7
            other.free()
            parcel = tier.put(content(40 * MIB, 1))
        tier.close()


def test_doctor_and_the_tier_say_the_same_of_the_node() -> None:
    rows = {name: (usable, reason) for name, usable, reason in report()}
    assert rows["host"] == (True, "")
    assert rows["numa"][0] == numa.placement(DEVICE)[0]
    assert rows["peer"][0] or "GPU" in rows["peer"][1]
    print(open_host(MIB, DEVICE).describe(), rows)


@two_gpus
def test_parcels_come_back_from_another_gpu() -> None:
    borrower, lender = run_workers("tests.dist.peer_tier_worker:borrow", 2, {"kind": "cuda", "capacity": MIB})
    assert borrower["wrong"] == 0 and borrower["where"] == {"peer": 200, "host": 0, "device": 0}
    assert borrower["describe"] == ["peer: 0.00 GB of GPU memory of rank 1"]
    assert borrower["told"] == lender["told"] == []


@two_gpus
def test_a_lender_that_is_killed_with_its_gpu_memory(tmp_path: Path) -> None:
    workers = start_workers("tests.dist.peer_tier_worker:lender_dies", 2, {"kind": "cuda"}, tmp_path)
    try:
        assert workers[0].wait(90) == 0, (tmp_path / "0.out").read_text()
    finally:
        stop_workers(workers)
    answer = json.loads((tmp_path / "0.json").read_text())
    expected = "rank 1, which lends memory to rank 0, has ended"
    assert answer["before"] and answer["problem"].startswith(expected)
    assert (answer["tier"], answer["after"]) == ("host", True)


@two_gpus
def test_a_gpu_without_room_lends_nothing() -> None:
    borrower, lender = run_workers("tests.dist.peer_tier_worker:cannot_lend", 2, {"kind": "cuda"})
    assert borrower["where"] == "device"
    assert all("CUDA_ERROR_OUT_OF_MEMORY" in rank["told"][0] for rank in (borrower, lender))

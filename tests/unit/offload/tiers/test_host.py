"""The host tier on a CPU: what goes in comes out, in bounded memory, with a clear word when there is none."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.tiers import TierFull, host, numa
from offload.tiers.host import HostMemory, available_memory, open_host
from offload.tiers.sizes import stored_bytes

CPU = torch.device("cpu")
KIB = 1024


def content(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("slab", [4 * KIB, 16 * KIB, 1 << 20])
def test_parcels_come_back_in_any_order_also_across_slabs(slab: int) -> None:
    tier = open_host(64 * KIB, CPU, slab)
    sizes = [1, 511, 512, 5000, 20_000, 7000]
    for round_ in range(3):
        parcels = [tier.put(content(size, round_ + size)) for size in sizes]
        assert tier.used == sum(stored_bytes("host", size) for size in sizes)
        for parcel in parcels:
            parcel.wait_stored()
            assert parcel.is_stored() and parcel.tier == "host"
        for index in (3, 0, 5, 1, 4, 2):
            parcels[index].fetch()
            parcels[index].fetch()
            assert torch.equal(parcels[index].take(), content(sizes[index], round_ + sizes[index]))
        assert torch.equal(parcels[0].take(), content(1, round_ + 1)), "it may be taken again"
        for parcel in parcels:
            parcel.free()
            parcel.free()
        assert tier.used == 0 and tier.peak == sum(stored_bytes("host", size) for size in sizes)
    tier.close()


def test_a_full_pool_says_what_to_change_and_recovers() -> None:
    tier = open_host(8 * KIB, CPU)
    first = tier.put(content(6 * KIB, 1))
    with pytest.raises(
        TierFull,
        match=r"the host tier is full: 6144 of 8192 bytes are in use, 3072 more .*raise offload\.host_gb",
    ):
        tier.put(content(3 * KIB, 2))
    first.free()
    assert torch.equal(tier.put(content(8 * KIB, 3)).take(), content(8 * KIB, 3))


def test_a_parcel_that_was_not_taken_is_given_back() -> None:
    tier = open_host(8 * KIB, CPU)
    for seed in range(20):
        parcel = tier.put(content(5 * KIB, seed))
        if seed % 2:
            parcel.fetch()
        parcel.free()
    assert tier.used == 0 and tier.peak == 5 * KIB


def test_memory_that_the_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    left = host.KEEP_FREE + 20 * KIB
    monkeypatch.setattr(host, "available_memory", lambda: left)
    tier = open_host(64 * KIB, CPU, 16 * KIB)
    kept = tier.put(content(16 * KIB, 1))
    left = host.KEEP_FREE + KIB
    monkeypatch.setattr(host, "available_memory", lambda: left)
    tier.memory._slabs[1:] = []  # type: ignore[attr-defined]
    with pytest.raises(TierFull, match=r"the host has 0\.5 GB of memory left.* lower offload\.host_gb"):
        tier.put(content(16 * KIB, 2))
    assert torch.equal(kept.take(), content(16 * KIB, 1))
    left = 1 << 40
    assert torch.equal(tier.put(content(16 * KIB, 2)).take(), content(16 * KIB, 2)), "it is asked again"


class Cudart:
    """Stands in for CUDA's runtime: notes what is locked."""

    def __init__(self, first_answers: tuple[int, ...] = ()) -> None:
        self.answers = list(first_answers)
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.locked
        answer = self.answers.pop(0) if self.answers else 0
        if answer == 0:
            self.locked[address] = nbytes
        return answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(numa, "node_of", lambda device: None)
    return made


def test_slabs_are_locked_one_ahead_and_never_beyond_the_capacity(cudart: Cudart) -> None:
    memory = HostMemory(40 * KIB, torch.device("cuda", 0), 16 * KIB)
    base = memory.bytes.data_ptr()
    assert cudart.locked == {}
    memory.reach(100)
    memory._slabs[-1].result()
    assert cudart.locked == {base: 16 * KIB, base + 16 * KIB: 16 * KIB}
    memory.reach(16 * KIB)
    assert len(cudart.locked) == 2
    memory.reach(16 * KIB + 1)
    memory.reach(40 * KIB)
    assert sum(cudart.locked.values()) == 40 * KIB and cudart.locked[base + 32 * KIB] == 8 * KIB
    memory.close()
    assert cudart.locked == {}


def test_memory_that_cannot_be_locked(cudart: Cudart) -> None:
    cudart.answers = [0, 2, 2]
    memory = HostMemory(32 * KIB, torch.device("cuda", 0), 16 * KIB)
    memory.reach(16 * KIB)
    assert isinstance(memory._slabs[1].exception(), TierFull), "it is told when the slab is needed"
    with pytest.raises(TierFull, match=r"could not be page-locked \(CUDA error 2\); lower offload\.host_gb"):
        memory.reach(32 * KIB)
    memory.reach(32 * KIB)  # it was possible later
    memory.close()
    assert cudart.locked == {}


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8000 kB\n")
    assert available_memory(tmp_path) == 8000 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.current").write_text("4000000\n")
    (group / "memory.stat").write_text("anon 1\nactive_file 100\ninactive_file 1000\n")
    assert available_memory(tmp_path) == 1_001_100
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 8000 << 10
    assert available_memory() > 1 << 20


def test_what_a_tier_says_of_itself() -> None:
    assert re.fullmatch(
        r"0\.50 GB of host memory, not placed by node: .+", open_host(500_000_000, CPU).describe()
    )


def test_cores_of_a_node(tmp_path: Path) -> None:
    assert numa.parse_cores("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8} and numa.parse_cores("\n") == set()
    mine = os.sched_getaffinity(0)
    for node, cores in ((0, str(min(mine))), (1, "4000-4010")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    assert numa.nodes(tmp_path) == [0, 1]
    assert numa.cores_of(0, tmp_path) == {min(mine)}
    assert numa.cores_of(1, tmp_path) == numa.cores_of(None, tmp_path) == mine


def test_a_thread_stays_where_it_was_put() -> None:
    with numa.thread_beside(CPU, "test") as thread:
        assert thread.submit(os.sched_getaffinity, 0).result() == os.sched_getaffinity(0)

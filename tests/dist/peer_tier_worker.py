"""One rank of the tests of the peer tier: it borrows, or it lends and may be killed."""

from __future__ import annotations

import datetime
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.tiers import OffloadError, open_tiers
from offload.tiers.chain import Tiers
from offload.tiers.peer import Peers

KIB = 1024
SIZES = (1, 513, 4096, 10_000, 30_000)


def content(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def join(device: torch.device | None = None) -> tuple[int, dist.Store]:
    """This rank, and a store that all share."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    return rank, store


def meet(store: dist.Store, name: str) -> None:
    """Wait for each other."""
    if store.add(name, 1) == 2:
        store.set(f"{name} reached", "")
    store.wait([f"{name} reached"])


def leave(rank: int, store: dist.Store) -> None:
    """Rank 0, which keeps the store, ends last."""
    if rank == 1:
        store.set("left", "")
    else:
        store.wait(["left"])


def borrow(kind: str = "cpu", capacity: int = 64 * KIB, host: int = 0) -> dict[str, Any]:
    """Rank 0 pushes to rank 1 and takes back, in random order; both close, and open once more."""
    rank, store = join()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    answer: dict[str, Any] = {}
    for opening in range(2):
        told: list[str] = []
        tiers = _open(rank, dist.PrefixStore(str(opening), store), device, capacity, told, host)
        if rank == 0:
            answer = _exchange(tiers, device) | {"told": told, "describe": tiers.describe()}
            tiers.close()
        meet(store, f"closed {opening}")
        if rank == 1:
            tiers.close()
            answer = {"told": told, "files": _shared_files()}
    leave(rank, store)
    return answer


def _open(
    rank: int, store: dist.Store, device: torch.device, capacity: int, told: list[str], host: int = 0
) -> Tiers:
    lends = {"lender": 1} if rank == 0 else {"lends": capacity}
    capacities = {"peer": capacity, "host": host} if rank == 0 else {}
    return open_tiers(capacities, device, peers=Peers(store, rank, **lends), warn=told.append)


def _exchange(tiers: Tiers, device: torch.device) -> dict[str, Any]:
    chance, held, wrong, where = random.Random(1), [], 0, {"peer": 0, "host": 0, "device": 0}
    for seed in range(200):
        size = chance.choice(SIZES)
        source = content(size, seed).to(device)
        parcel = tiers.put("peer", source)
        where[parcel.tier if parcel else "device"] += 1
        if parcel is not None:
            parcel.wait_stored()
            held.append((parcel, size, seed))
            source.zero_()  # it may be used again
        while len(held) > 3:
            parcel, size, made = held.pop(chance.randrange(len(held)))
            parcel.fetch()
            wrong += not torch.equal(parcel.take().cpu(), content(size, made))
            parcel.free()
    peer = tiers.tiers["peer"]
    return {"wrong": wrong, "where": where, "peak": peer.peak}


def _shared_files() -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if "offload" in path.name]


def lender_dies(kind: str = "cpu") -> dict[str, Any]:
    """Rank 1 is killed while rank 0 has something there."""
    rank, store = join()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    told: list[str] = []
    tiers = _open(rank, store, device, 64 * KIB, told, 64 * KIB)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        time.sleep(60)
    lost, fetched = (tiers.put("peer", content(5000, seed).to(device)) for seed in (1, 2))
    assert lost is not None and fetched is not None
    before = torch.equal(lost.take().cpu(), content(5000, 1))
    fetched.fetch()
    os.kill(int(store.get("pid")), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (problem := _problem(lost)):
        time.sleep(0.01)
    parcel = tiers.put("peer", content(5000, 3).to(device))
    assert parcel is not None
    after = torch.equal(parcel.take().cpu(), content(5000, 3))
    lost.free()
    answer = {
        "before": before, "problem": problem, "fetched": _problem(fetched), "tier": parcel.tier,
        "after": after, "told": told,
    }  # fmt: skip
    fetched.free()
    tiers.close()
    return answer


def _problem(parcel: Any) -> str:
    try:
        parcel.take()
    except OffloadError as error:
        return str(error)
    return ""


def cannot_lend(kind: str = "cpu") -> dict[str, Any]:
    """The lender has no room, or never speaks."""
    rank, store = join()
    told: list[str] = []
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    tiers = _open(rank, store, device, 1 << 50, told)
    where = "nowhere"
    if rank == 0:
        parcel = tiers.put("peer", content(100, 1).to(device))
        where = parcel.tier if parcel else "device"
    meet(store, "tried")
    tiers.close()
    leave(rank, store)
    return {"told": told, "where": where}

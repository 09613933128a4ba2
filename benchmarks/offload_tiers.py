"""GB/s into and out of each tier of saved activations, against the bare copy or file, in one run.

Workload: parcels of 64 and of 4 MiB, `out` from the device into the tier until all are stored, `in` back
into new device tensors. On GPUs the device is cuda:0; on a CPU it is host memory.

- host: against cudaMemcpyAsync from and to one pinned buffer of a parcel's size (on a CPU memcpy).
- nvme: a file in `--folder`, which should be on a fast local disk: against plain O_DIRECT calls of the
  engine's block size (or a parcel's) on as many threads, from and to host memory. The tier's figure contains
  the copies to and from the device, header, checksum and its check.
- peer: memory that a second rank lends: against a copy between the two GPUs in one process (on a CPU memcpy).

GB/s are medians of the repeats, tier and bare way in turn. `fraction_of_raw` is of the large parcels; the
goal is 0.9.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import report
from benchmarks.common.ranks import run_ranks
from offload.files.alignment import ALIGNMENT
from offload.files.engine import BLOCK, THREADS, aligned_bytes, new_engine
from offload.tiers import Tier, open_tiers
from offload.tiers.peer import Peers

TIERS = ("host", "nvme", "peer")
MIB = 1 << 20
Run = Callable[[], object]
Rates = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Size:
    """How much is moved."""

    parcel: int
    count: int
    repeats: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.parcel * self.count

    @property
    def ahead(self) -> int:
        """Parcels that are brought back ahead of their use."""
        return min(self.count, max(1, 256 * MIB // self.parcel))


def sizes(quick: bool, tier: str) -> list[Size]:
    """Large parcels first."""
    if quick:
        return [Size(8 * MIB, 4, 2), Size(MIB, 16, 2)]
    total = (2 << 30) if tier != "nvme" else 1 << 30
    return [Size(64 * MIB, total // (64 * MIB), 5), Size(4 * MIB, total // 2 // (4 * MIB), 5)]


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="where the file of nvme is (default: a temporary one)")
    parser.add_argument("--tier", action="append", choices=TIERS, help="only these")
    options = parser.parse_args()
    wanted = options.tier or list(TIERS)
    rows: list[dict[str, Any]] = []
    described: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for tier in wanted:
            arguments = {"tier": tier, "quick": options.quick, "folder": folder}
            if tier != "peer":
                found = local(**arguments)
            elif torch.cuda.device_count() == 1:
                print("peer: needs two GPUs")
                continue
            else:
                found = run_ranks("benchmarks.offload_tiers:peer_rank", 2, arguments, timeout=300)
            rows += found["rows"]
            described[tier] = found["describe"]
            print(report.table(found["rows"]), flush=True)
    large = [row for row in rows if row["large"]]
    fractions: dict[str, dict[str, float]] = {}
    for row in large:
        fractions.setdefault(row["tier"], {})[row["direction"]] = row["fraction_of_raw"]
    report.publish({"fraction_of_raw": fractions, "tiers": described, "rows": rows}, rows, options.json)


def local(tier: str, quick: bool, folder: str) -> dict[str, Any]:
    """A tier that this process has alone."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return measure(tier, device, quick, Path(folder))


def peer_rank(tier: str, quick: bool, folder: str) -> dict[str, Any]:
    """Rank 0 borrows from rank 1 and measures."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, 2, rank == 0)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if rank == 0:
        found = measure(tier, device, quick, Path(folder), Peers(store, 0, lender=1))
        store.set("done", "")
        store.wait(["end"])
        return found
    capacity = max(size.total for size in sizes(quick, tier))
    tiers = open_tiers({}, device, peers=Peers(store, 1, lends=capacity), warn=print)
    store.wait(["done"])
    tiers.close()
    store.set("end", "")
    return {}


def measure(
    tier: str, device: torch.device, quick: bool, folder: Path, peers: Peers | None = None
) -> dict[str, Any]:
    """Rows of a tier, and what it says of itself."""
    planned = sizes(quick, tier)
    capacity = int(max(size.total for size in planned) * 1.02)
    tiers = open_tiers({tier: capacity}, device, nvme_dir=folder, peers=peers, fallback=False, warn=print)
    rows = []
    for index, size in enumerate(planned):
        with bare(tier, device, size, folder) as runs:
            rates = alternate(tier_runs(tiers.tiers[tier], device, size), runs, size)
        for direction, found in rates.items():
            speed, raw = (statistics.median(found[way]) for way in ("tier", "raw"))
            rows.append(
                {
                    "tier": tier,
                    "direction": direction,
                    "MiB": size.parcel // MIB,
                    "GB/s": speed,
                    "raw GB/s": raw,
                    "fraction_of_raw": speed / raw,
                    "slowest": min(found["tier"]),
                    "fastest": max(found["tier"]),
                    "large": index == 0,
                }
            )
    described = tiers.tiers[tier].describe()
    tiers.close()
    return {"rows": rows, "describe": described}


def alternate(tier: dict[str, Run], raw: dict[str, Run], size: Size) -> Rates:
    """GB/s of each repeat by direction and way, after one round that warms up."""
    rates: Rates = {direction: {"tier": [], "raw": []} for direction in tier}
    for repeat in range(size.repeats + 1):
        for direction in ("out", "in"):
            for way, runs in (("tier", tier), ("raw", raw)):
                finish()
                started = time.perf_counter()
                runs[direction]()
                finish()
                if repeat:
                    rates[direction][way].append(size.total / (time.perf_counter() - started) / 1e9)
    return rates


def finish() -> None:
    """Wait for the device; a benchmark may."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tier_runs(tier: Tier, device: torch.device, size: Size) -> dict[str, Run]:
    """Put all parcels until they are stored, and bring them back."""
    source = torch.randint(0, 256, (size.parcel,), dtype=torch.uint8, device=device)
    held: list[Any] = []

    def out() -> None:
        for _ in range(size.count):
            held.append(tier.put(source))
        for parcel in held:
            parcel.wait_stored()
            if hasattr(parcel, "written"):
                parcel.written.wait()

    def back() -> None:
        for parcel in held[: size.ahead]:
            parcel.fetch()
        for index, parcel in enumerate(held):
            if index + size.ahead < size.count:
                held[index + size.ahead].fetch()
            last = parcel.take()
            parcel.free()
        assert torch.equal(last, source)
        held.clear()

    return {"out": out, "in": back}


@contextlib.contextmanager
def bare(tier: str, device: torch.device, size: Size, folder: Path) -> Iterator[dict[str, Run]]:
    """The same bytes without a tier."""
    if tier == "nvme":
        with bare_file(folder, size) as runs:
            yield runs
        return
    here = torch.randint(0, 256, (size.parcel,), dtype=torch.uint8, device=device)
    if device.type == "cuda":
        there = (
            torch.empty(size.parcel, dtype=torch.uint8, pin_memory=True)
            if tier == "host"
            else torch.empty(size.parcel, dtype=torch.uint8, device="cuda:1")
        )
        region = [there] * size.count
    else:
        region = list(torch.zeros(size.total, dtype=torch.uint8).split(size.parcel))

    def out() -> None:
        for there in region:
            there.copy_(here, non_blocking=True)

    def back() -> None:
        arrived: deque[torch.Tensor] = deque(maxlen=size.ahead)
        for there in region:
            arrived.append(torch.empty_like(here))
            arrived[-1].copy_(there, non_blocking=True)

    yield {"out": out, "in": back}


@contextlib.contextmanager
def bare_file(folder: Path, size: Size) -> Iterator[dict[str, Run]]:
    """Plain calls on a preallocated file, O_DIRECT where the file system allows it."""
    engine = new_engine()
    file = engine.open(folder)
    os.posix_fallocate(file, 0, size.total)
    block = min(BLOCK, size.parcel)
    assert block % ALIGNMENT == size.total % block == 0
    buffers = [aligned_bytes(block).random_(0, 256).numpy() for _ in range(THREADS)]
    places = [range(thread * block, size.total, THREADS * block) for thread in range(THREADS)]

    def write(places: Sequence[int], buffer: Any) -> None:
        for place in places:
            assert os.pwrite(file, buffer, place) == block

    def read(places: Sequence[int], buffer: Any) -> None:
        for place in places:
            assert os.preadv(file, [buffer], place) == block

    with ThreadPoolExecutor(THREADS) as pool:
        yield {
            "out": lambda: list(pool.map(write, places, buffers)),
            "in": lambda: list(pool.map(read, places, buffers)),
        }
    engine.close(file)


if __name__ == "__main__":
    main()

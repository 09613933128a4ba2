"""Checks of a rank's machine before a run: GPU, products, disk; then among all ranks: versions, clocks.

Each failure is one line with host and rank. What a rank can find alone is looked for before it joins others.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..fault_config import FaultConfig

GIB = 1 << 30
PACKAGES = ("k3train", "torch", "megatron-core", "triton", "transformer-engine", "flash-linear-attention")
FREE_SHARE = 0.9
"""Of a GPU's memory, that must be free: less, and another process is on it."""
SIZE = {"cpu": 384, "cuda": 4096}
REDUCED = {"cpu": 1 << 20, "cuda": 1 << 26}
"""FP32 elements of the all-reduce that is timed."""
WRITTEN = 8 << 20
SLOWEST_DISK = 1 << 20
"""Bytes a second, below which a checkpoint will not end."""
REPEATS = {"cpu": 25, "cuda": 5}
"""Products, of which the fastest counts: ranks on CPUs take turns on a core."""
ADDENDS = 256
"""Different numbers that ranks add up, so few that every sum of 65,536 ranks is exact in FP32."""
MOST_LINES = 8
"""Problems that are listed; one machine that differs has as many as it has ranks."""


class UnhealthyError(RuntimeError):
    """A machine is not fit to train on.

    Args:
        alike: every rank says the same.
    """

    def __init__(self, text: str, *, alike: bool = False) -> None:
        super().__init__(text)
        self.alike = alike


@dataclass(frozen=True)
class Facts:
    """What a rank found out about its machine."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    tflops: float
    """Of a BF16 product on a GPU, an FP32 one on a CPU."""
    memory_free: int
    disk_free: int
    disk_write: float
    """Bytes a second, synced."""


def of_rank(folder: Path, device: str) -> Facts:
    """`look` for this process, before it has joined the others; `device` as in `run.device`."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = torch.cuda.is_available() and device != "cpu"
    place = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    rank = int(os.environ.get("RANK", 0))
    if on_gpu and local >= torch.cuda.device_count():
        raise UnhealthyError(
            f"rank {rank} on {socket.gethostname()}: torch sees {torch.cuda.device_count()} GPUs, not the "
            f"{local + 1} that its ranks need"
        )
    return look(folder, rank, place)


def look(folder: Path, rank: int, device: torch.device) -> Facts:
    """Check this rank's machine by itself.

    Args:
        folder: where checkpoints will go; made if necessary.

    Raises:
        UnhealthyError: naming host, rank and what is wrong.
    """
    where = f"rank {rank} on {socket.gethostname()}"
    free = _memory(device, where)
    tflops = _products(device, where)
    disk_free, disk_write = _disk(folder, rank, where)
    return Facts(rank, socket.gethostname(), _name(device), versions(), tflops, free, disk_free, disk_write)


def meet(facts: Facts, device: torch.device, fault: FaultConfig) -> dict[str, Any]:
    """Compare all ranks, and time an all-reduce among them; a collective over all ranks.

    Returns:
        what was found, for a person; the same on every rank.

    Raises:
        UnhealthyError: on every rank alike.
    """
    ranks = dist.get_world_size()
    dist.barrier()
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, (asdict(facts), time.time()))
    everyone = [Facts(**found) for found, _ in told]
    bandwidth = _all_reduce(device, facts)
    problems = compare(everyone, [clock for _, clock in told], fault)
    if problems:
        more = [f"and {len(problems) - MOST_LINES} more"] if len(problems) > MOST_LINES else []
        raise UnhealthyError("; ".join(problems[:MOST_LINES] + more), alike=True)
    return {
        "ranks": ranks,
        "hosts": len({found.host for found in everyone}),
        "tflops_median": statistics.median(found.tflops for found in everyone),
        "tflops_least": min(found.tflops for found in everyone),
        "all_reduce_gb_per_second": bandwidth / 1e9,
        "disk_mb_per_second_least": min(found.disk_write for found in everyone) / 1e6,
        "clock_skew_seconds": max(clock for _, clock in told) - min(clock for _, clock in told),
    }


def compare(everyone: Sequence[Facts], clocks: Sequence[float], fault: FaultConfig) -> list[str]:
    """What is wrong among the ranks, a line for each; nothing where all is well.

    Args:
        clocks: every rank's wall clock behind one barrier, seconds.
    """
    problems, first = [], everyone[0]
    typical = statistics.median(found.tflops for found in everyone)
    reference = statistics.median(clocks)
    for found, clock in zip(everyone, clocks, strict=True):
        where = f"rank {found.rank} on {found.host}"
        for package, number in found.versions.items():
            if number != first.versions.get(package):
                problems.append(f"{where} has {package} {number}, rank 0 {first.versions.get(package)}")
        if found.device != first.device:
            problems.append(f"{where} has {found.device}, rank 0 {first.device}")
        if found.tflops < fault.health_slow * typical:
            problems.append(
                f"{where} computes {found.tflops:.3g} TFLOP/s, the median {typical:.3g} (fault.health_slow)"
            )
        if abs(clock - reference) > fault.health_skew_seconds:
            problems.append(f"the clock of {where} is {clock - reference:+.1f} s off; synchronise it")
    return problems


def versions() -> dict[str, str]:
    """Of the packages that have to be the same on all ranks; "-" for one that is not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    return found


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _memory(device: torch.device, where: str) -> int:
    """Free bytes of the device."""
    if device.type != "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    free, total = torch.cuda.mem_get_info(device)
    if free < FREE_SHARE * total:
        raise UnhealthyError(
            f"{where}: {device} has {free / GIB:.1f} of {total / GIB:.1f} GiB free; another process is on it"
        )
    return free


def _products(device: torch.device, where: str) -> float:
    """TFLOP/s of a product, whose result is proved right.

    Freivalds: for whole numbers small enough to be exact in FP32, A (B v) = (A B) v for every vector v.
    """
    size = SIZE[device.type]
    generator = torch.Generator().manual_seed(size)
    left, right = (torch.randint(-3, 4, (size, size), generator=generator).float() for _ in range(2))
    vector = torch.randint(-1, 2, (size, 1), generator=generator).double()
    expected = left.double() @ (right.double() @ vector)
    left, right = left.to(device), right.to(device)
    if not torch.equal((left @ right).double().cpu() @ vector, expected):
        raise UnhealthyError(f"{where}: {device} computes a product of whole numbers wrongly; replace it")
    if device.type == "cuda":
        left, right = left.bfloat16(), right.bfloat16()
    times = [_timed(left, right) for _ in range(REPEATS[device.type])]
    return 2 * size**3 / min(times) / 1e12


def _timed(left: torch.Tensor, right: torch.Tensor) -> float:
    synchronize = torch.cuda.synchronize if left.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    left @ right
    synchronize()
    return time.perf_counter() - start


def _disk(folder: Path, rank: int, where: str) -> tuple[int, float]:
    """Free bytes of the disk, and bytes a second that it takes."""
    probe = folder / f".health-{rank}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with probe.open("wb") as file:
            file.write(os.urandom(1 << 16) * (WRITTEN >> 16))
            file.flush()
            os.fsync(file.fileno())
        speed = WRITTEN / (time.perf_counter() - start)
        stat = os.statvfs(folder)
    except OSError as error:
        raise UnhealthyError(f"{where}: cannot write in {folder}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    if speed < SLOWEST_DISK:
        raise UnhealthyError(f"{where}: {folder} takes {speed / 1e6:.2f} MB a second")
    return stat.f_bavail * stat.f_frsize, speed


def _all_reduce(device: torch.device, facts: Facts) -> float:
    """Bytes a second of an all-reduce, as NCCL's tests count them; its result is proved right."""
    ranks = dist.get_world_size()
    values = torch.full((REDUCED[device.type],), float(facts.rank % ADDENDS), device=device)
    dist.all_reduce(values)
    total = sum(rank % ADDENDS for rank in range(ranks))
    wrong = not bool((values == total).all())
    values.fill_(1.0)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(values)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, (f"rank {facts.rank} on {facts.host}" if wrong else "", seconds))
    if bad := [where for where, _ in found if where]:
        raise UnhealthyError(
            f"an all-reduce of {ranks} ranks gave wrong sums on {', '.join(bad)}", alike=True
        )
    slowest = max(seconds for _, seconds in found)
    return values.numel() * values.element_size() * 2 * (ranks - 1) / ranks / slowest

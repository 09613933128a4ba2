"""Pinned host memory, beside the GPU, page-locked piece by piece as it is needed.

One stretch of addresses of the pool's capacity is reserved at once; slabs of it are locked by a thread on the
cores beside the GPU, always one slab ahead of what is used. A copy that crosses slabs is cut there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from ..files.alignment import round_up
from . import TierFull
from .copies import Copies
from .memory import MemoryTier
from .numa import placement, thread_beside

_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which mmap does not name before Python 3.13."""
SLAB = 512 << 20
KEEP_FREE = 512 << 20
"""Bytes of the machine's memory that are left to others."""
REMEDY = "raise offload.host_gb, or let less go to the host (offload.sites)"


def open_host(capacity: int, device: torch.device, slab: int = SLAB) -> MemoryTier:
    """The host tier. Nothing is locked before it is needed."""
    return MemoryTier("host", HostMemory(capacity, device, slab), Copies(device), REMEDY)


class HostMemory:
    """See `Memory`."""

    def __init__(self, capacity: int, device: torch.device, slab: int = SLAB) -> None:
        self.capacity, self._device, self._slab = capacity, device, slab
        self._map = mmap.mmap(
            -1, round_up(capacity),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
        )  # fmt: skip
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                self._map.madvise(getattr(mmap, advice))
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)[:capacity]
        """All of it; what lies below the end that was reached may be used."""
        self._thread = thread_beside(device, "pin")
        self._slabs: list[Future[None]] = []
        self._reached = 0

    def reach(self, end: int) -> None:
        """See `Memory`."""
        if end <= self._reached:
            return
        needed = -(-end // self._slab)
        self._start(needed + 1)
        for index in range(self._reached // self._slab, needed):
            slab = self._slabs[index]
            if slab.done() and slab.exception() is not None:  # there may be memory again
                slab = self._slabs[index] = self._thread.submit(self._lock, index)
            slab.result()
        self._reached = min(needed * self._slab, self.capacity)

    def check(self) -> None:
        """See `Memory`."""

    def write(self, offset: int, source: Tensor) -> None:
        """See `Memory`."""
        for here, there in self._pieces(offset, source):
            here.copy_(there, non_blocking=True)

    def read(self, offset: int, target: Tensor) -> None:
        """See `Memory`."""
        for here, there in self._pieces(offset, target):
            there.copy_(here, non_blocking=True)

    def describe(self) -> str:
        """See `Tier`."""
        kind = "pinned host memory" if self._device.type == "cuda" else "host memory"
        beside, why = placement(self._device)
        return f"{self.capacity / 1e9:.2f} GB of {kind}, {why if beside else f'not placed by node: {why}'}"

    def close(self) -> None:
        """See `Memory`."""
        self._thread.shutdown()
        if self._device.type == "cuda":
            for index, slab in enumerate(self._slabs):
                if slab.exception() is None:
                    torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr() + index * self._slab)
        self._slabs.clear()

    def _start(self, count: int) -> None:
        """Lock slabs up to `count`, or as many as there are."""
        for index in range(len(self._slabs), min(count, -(-self.capacity // self._slab))):
            self._slabs.append(self._thread.submit(self._lock, index))

    def _lock(self, index: int) -> None:
        begin = index * self._slab
        nbytes = min(self._slab, self.capacity - begin)
        left = available_memory()
        if left < nbytes + KEEP_FREE:
            raise TierFull(
                f"the host has {left / 1e9:.1f} GB of memory left, the pool of activations holds "
                f"{begin / 1e9:.1f} GB and needs {nbytes / 1e9:.1f} GB more; lower offload.host_gb, or let "
                "less go to the host (offload.sites)"
            )
        if self._device.type != "cuda":
            return
        with torch.cuda.device(self._device):
            answer = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr() + begin, nbytes, 0)
        if int(answer) != 0:
            raise TierFull(
                f"{nbytes / 1e9:.1f} GB of host memory could not be page-locked (CUDA error {int(answer)}); "
                "lower offload.host_gb"
            )

    def _pieces(self, offset: int, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of this memory, part of the other tensor), cut at slabs: each is locked for itself."""
        start = 0
        while start < len(other):
            begin = offset + start
            length = min(len(other) - start, self._slab - begin % self._slab)
            yield self.bytes[begin : begin + length], other[start : start + length]
            start += length


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that may still be taken: the machine's, or what a control group leaves."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    left = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10
    group = root / "sys/fs/cgroup"
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            held = int((group / "memory.current").read_text())
            held -= int(stat["active_file"]) + int(stat["inactive_file"])  # given back when needed
            left = min(left, int(limit) - held)
    except (OSError, KeyError, ValueError):
        pass  # no control group of version 2, or none of memory
    return left

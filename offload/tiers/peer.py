"""Memory that another rank of the host lends: a GPU's over NVLink, or on a CPU memory shared by processes.

The lender allocates a region and says so once, through a store. From then on the borrower alone decides
what lies where in it and moves the bytes with its own copy engines: no message, and no rank waits for
another.

The lender holds a lock on a nameless file as long as it lives, which the kernel takes from it however it
ends. The borrower tries that lock, without waiting, before it relies on the region. On a CPU the same file
is the region.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import mmap
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..files.alignment import ALIGNMENT, round_up
from . import OffloadError, driver
from .copies import Copies
from .host import KEEP_FREE, available_memory
from .memory import MemoryTier

REMEDY = "raise offload.peer_gb, or let less go to the peer (offload.sites)"
FRESH = 1e-3
"""Seconds for which a lender that was alive is taken to be."""
PATIENCE = datetime.timedelta(minutes=5)
"""For a lender to say what it lends."""


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Let everyone know a value."""
        ...

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Return when the keys are known. Raises an error after the timeout."""
        ...

    def get(self, key: str) -> bytes:
        """A value that is known."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether keys are known."""
        ...


@dataclass(frozen=True)
class Peers:
    """Who lends to whom. The names in the store are those of one opening: give it a prefix for each."""

    store: Store
    rank: int
    lender: int | None = None
    """The rank that this one borrows from."""
    lends: int = 0
    """Bytes that this rank lends."""


@dataclass(frozen=True)
class Offer:
    """What a borrower must know of a region."""

    nbytes: int
    place: str = ""
    """The host and the space of process ids."""
    pid: int = 0
    file: int = 0
    handle: str = ""
    """Of a GPU's memory, hexadecimal; empty: the file is the region."""
    problem: str = ""
    """Why there is no region."""


class Loan:
    """A region that this rank lends, until `close` or the end of the process."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        """Allocate and announce `peers.lends` bytes; what goes wrong is announced too."""
        self._peers, self._device = peers, device
        self._file: int | None = None
        self._address: int | None = None
        self.problem = ""
        try:
            offer = self._open(peers.lends)
        except (OSError, OffloadError) as error:
            self.problem = f"rank {peers.rank} cannot lend {peers.lends / 1e9:.2f} GB: {error}"
            offer = Offer(peers.lends, problem=self.problem)
        peers.store.set(_offer_key(peers.rank), json.dumps(asdict(offer)))

    def close(self) -> None:
        """End it. Memory that a borrower still uses stays until the process ends."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._address is not None and self._is_returned():
            with _current(self._device):
                driver.release(self._address)
        self._address = None

    def _is_returned(self) -> bool:
        with contextlib.suppress(Exception):  # the store may be gone already
            return self._peers.store.check([_return_key(self._peers.rank)])
        return False

    def _open(self, nbytes: int) -> Offer:
        on_gpu = self._device.type == "cuda"
        left = available_memory()
        if not on_gpu and left < nbytes + KEEP_FREE:
            raise OffloadError(f"the host has {left / 1e9:.1f} GB of memory left")
        self._file = os.memfd_create("offload-peer", os.MFD_CLOEXEC)
        os.ftruncate(self._file, ALIGNMENT if on_gpu else round_up(nbytes))
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        handle = ""
        if on_gpu:
            with _current(self._device):
                self._address = driver.allocate(nbytes)
                handle = driver.export(self._address).hex()
        return Offer(nbytes, here(), os.getpid(), self._file, handle)


class PeerMemory:
    """See `Memory`: what a lender offers, seen by the borrower."""

    def __init__(self, peers: Peers, device: torch.device, patience: datetime.timedelta = PATIENCE) -> None:
        """Wait for the offer and open it. Raises OffloadError."""
        assert peers.lender is not None
        self._peers, self._lender, self._device = peers, peers.lender, device
        offer = _read_offer(peers.store, peers.lender, patience)
        if offer.place != here():
            raise OffloadError(f"rank {peers.lender}, which lends to rank {peers.rank}, is not on this host")
        self.capacity = offer.nbytes
        self._file = _open_file(offer, peers.lender)
        self._address: int | None = None
        self._checked = -FRESH
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if bool(offer.handle) != (device.type == "cuda"):
            raise OffloadError(f"ranks {peers.lender} and {peers.rank} have different kinds of devices")
        if offer.handle:
            with _current(device):
                self._address = driver.attach(bytes.fromhex(offer.handle))
        else:
            region = mmap.mmap(self._file, round_up(offer.nbytes))
            self._bytes = torch.frombuffer(region, dtype=torch.uint8)
        self.check()

    def reach(self, end: int) -> None:
        """See `Memory`: all of it is there."""

    def check(self) -> None:
        """See `Memory`."""
        now = time.monotonic()
        if now < self._checked + FRESH:
            return
        if not _is_locked(self._file):
            raise OffloadError(
                f"rank {self._lender}, which lends memory to rank {self._peers.rank}, has ended, and what "
                "was in it is lost; start the run again from its last checkpoint"
            )
        self._checked = now

    def write(self, offset: int, source: Tensor) -> None:
        """See `Memory`."""
        if self._address is None:
            self._bytes[offset : offset + len(source)].copy_(source)
        else:
            driver.copy(self._address + offset, source.data_ptr(), len(source), self._stream())

    def read(self, offset: int, target: Tensor) -> None:
        """See `Memory`."""
        if self._address is None:
            target.copy_(self._bytes[offset : offset + len(target)])
        else:
            driver.copy(target.data_ptr(), self._address + offset, len(target), self._stream())

    def describe(self) -> str:
        """See `Tier`."""
        kind = "shared memory" if self._address is None else "GPU memory"
        return f"{self.capacity / 1e9:.2f} GB of {kind} of rank {self._lender}"

    def close(self) -> None:
        """See `Memory`."""
        if self._address is not None:
            with _current(self._device):
                driver.detach(self._address)
        os.close(self._file)
        with contextlib.suppress(Exception):  # the lender's store may have gone with it
            self._peers.store.set(_return_key(self._lender), "returned")

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)


def open_peer(peers: Peers, device: torch.device, patience: datetime.timedelta = PATIENCE) -> MemoryTier:
    """The peer tier of a borrower. Raises OffloadError."""
    return MemoryTier("peer", PeerMemory(peers, device, patience), Copies(device), REMEDY)


def here() -> str:
    """The host and its space of process ids: two processes that say the same find each other's files."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def why_no_gpu_reaches_another() -> str | None:
    """Why no GPU of this host can use another's memory, or None."""
    count = torch.cuda.device_count()
    if count < 2:
        return f"{count} GPUs on this host" if count != 1 else "one GPU on this host"
    pairs = ((one, other) for one in range(count) for other in range(count) if one != other)
    if not any(torch.cuda.can_device_access_peer(one, other) for one, other in pairs):
        return "no GPU reaches another's memory"
    return None


def _read_offer(store: Store, lender: int, patience: datetime.timedelta) -> Offer:
    key = _offer_key(lender)
    try:
        store.wait([key], patience)
    except Exception as error:  # each store has errors of its own
        raise OffloadError(f"rank {lender} did not say within {patience} what it lends") from error
    fields: dict[str, Any] = json.loads(store.get(key))
    offer = Offer(**fields)
    if offer.problem:
        raise OffloadError(f"{offer.problem}; lower offload.peer_gb")
    return offer


def _open_file(offer: Offer, lender: int) -> int:
    """The lender's file, opened anew: a lock of this process must not be the lender's."""
    try:
        return os.open(f"/proc/{offer.pid}/fd/{offer.file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OffloadError(f"rank {lender}, which lends memory, cannot be reached: {error}") from error


def _is_locked(file: int) -> bool:
    """Whether another process holds the lock on a file."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError:
        return True
    fcntl.lockf(file, fcntl.LOCK_UN, 1)
    return False


@contextlib.contextmanager
def _current(device: torch.device) -> Any:
    """Make a device's context current on this thread."""
    with torch.cuda.device(device):
        torch.empty(1, device=device)
        torch.cuda.current_stream(device).query()
        yield


def _offer_key(lender: int) -> str:
    return f"offer/{lender}"


def _return_key(lender: int) -> str:
    return f"returned/{lender}"

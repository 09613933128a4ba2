"""Rows and experts through the memory of the other GPUs of a host, over NVLink, by their copy engines.

Every message goes the same way, in passes of bounded size: a sender copies a part of it into staging memory
at the receiver, all ranks meet at a barrier on the device, and the receiver copies the part to where it
belongs. Results are therefore ordinary tensors, staging never grows, and the host waits for nothing.

Why no part is overwritten before it was taken: staging has two halves, used in turn. A rank enters the
barrier of pass j after it has taken what pass j - 1 brought, and the others write for pass j + 1, into the
half of pass j - 1, after that barrier.

Symmetric memory is that of torch.distributed, without NVLink multicast. Letters: R ranks, P experts at home
on a rank, n rows, w their width.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from . import Pending, TransportError, Wanted

STAGING = 128 << 20
"""Bytes of staging memory of a lane; a transport has two."""
_ALIGNMENT = 512

Messages = Sequence[Sequence[Tensor]]
"""For each rank, the pieces that go there or come from there: flat bytes, one after another."""


class PeerTransport:
    """See `Transport`. Rows and experts have a lane each and pass beside each other."""

    name = "peer"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, staging: int = STAGING) -> None:
        """Collective. All transports of a group share its lanes.

        Raises:
            TransportError: `why_not` knows the reason.
        """
        lanes = _lanes(group, device, staging)
        if isinstance(lanes, str):
            raise TransportError(lanes)
        self.group, self.device = group, device
        self._rows, self._experts = lanes
        self.ranks, self.rank = self._rows.ranks, self._rows.rank

    def gather(self, row: Tensor) -> Tensor:
        """See `Transport.gather`."""
        piece = _bytes(row.contiguous())
        gathered = row.new_empty(self.ranks, *row.shape)
        arriving = [[_bytes(place)] for place in gathered]
        self._rows.carry([[piece]] * self.ranks, arriving, len(piece)).wait()
        return gathered

    def exchange(
        self,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        into: Tensor | None = None,
        most: int | None = None,
    ) -> Pending[Tensor]:
        """See `Transport.exchange`."""
        assert sum(sent) == len(rows), f"{len(rows)} rows, {sum(sent)} to send"
        target = rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into
        assert sum(received) == len(target), f"{sum(received)} rows to receive into {len(target)}"
        known = max(max(sent[peer], received[peer]) for peer in range(self.ranks) if peer != self.rank)
        if most is None:
            assert self.ranks == 2, "with more than two ranks no rank knows the others' counts: pass `most`"
            most = known
        assert known <= most, f"{known} rows between two ranks, said to be at most {most}"
        width = math.prod(rows.shape[1:]) * rows.element_size()
        leaving = _bytes(rows.contiguous()).split([count * width for count in sent])
        arriving = _bytes(target).split([count * width for count in received])
        arrival = self._rows.carry([[each] for each in leaving], [[each] for each in arriving], most * width)
        return Pending([arrival], lambda: target)

    def fetch_experts(self, wanted: Wanted, own: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """See `Transport.fetch_experts`. The copies lie side by side in one storage."""
        places, mine = len(own), wanted[self.rank]
        slots = list(own[0].new_empty(len(mine), *own[0].shape))
        leaving = [
            [_bytes(own[expert % places].contiguous()) for expert in experts if expert // places == self.rank]
            for experts in wanted
        ]
        arrival = self._experts.carry(
            leaving, self._by_home(mine, slots, places), _most(wanted, own[0], places)
        )
        return Pending([arrival], lambda: slots)

    def return_gradients(
        self, wanted: Wanted, gradients: Sequence[Tensor], places: int, like: Tensor
    ) -> Pending[list[list[Tensor]]]:
        """See `Transport.return_gradients`."""
        home: list[list[Tensor]] = [[] for _ in range(places)]
        arriving: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for rank, experts in enumerate(wanted):
            for expert in experts:
                if expert // places == self.rank:
                    piece = torch.empty_like(like, memory_format=torch.contiguous_format)
                    home[expert % places].append(piece)
                    arriving[rank].append(_bytes(piece))
        sent = [gradient.contiguous() for gradient in gradients]
        leaving = self._by_home(wanted[self.rank], sent, places)
        arrival = self._experts.carry(leaving, arriving, _most(wanted, like, places))
        return Pending([arrival], lambda: home)

    def _by_home(self, experts: Sequence[int], tensors: Sequence[Tensor], places: int) -> list[list[Tensor]]:
        """The bytes of one tensor for each expert, under the rank where the expert lives."""
        found: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for expert, tensor in zip(experts, tensors, strict=True):
            found[expert // places].append(_bytes(tensor))
        return found


class _Lane:
    """Staging memory on all ranks, and the streams that fill and empty it. Messages keep their order."""

    def __init__(self, group: dist.ProcessGroup, memory: Tensor) -> None:
        """Collective. memory: as many bytes of symmetric memory on each rank, for good."""
        self._memory = memory
        self._handle = symmetric_memory.rendezvous(memory, group)
        self.ranks, self.rank = self._handle.world_size, self._handle.rank
        self._part = memory.numel() // (2 * (self.ranks - 1)) // _ALIGNMENT * _ALIGNMENT
        assert self._part, f"{memory.numel()} bytes of staging are too few for {self.ranks} ranks"
        shape = (2, self.ranks - 1, self._part)
        self._staging = [self._handle.get_buffer(rank, shape, torch.uint8) for rank in range(self.ranks)]
        # The barrier is a kernel of one warp: it must not queue behind those of the computation.
        self._pusher, self._taker = (torch.cuda.Stream(memory.device, priority=-1) for _ in range(2))
        self._half = 0

    def carry(self, leaving: Messages, arriving: Messages, most: int) -> _Arrival:
        """Send leaving[r] to each rank r, receive arriving[r], both as long; collective.

        A rank's message to itself is copied piece by piece. `most`: bytes of the longest message between two
        different ranks or more, the same number on all ranks.
        """
        caller = torch.cuda.current_stream(self._memory.device)
        begun = caller.record_event()
        self._pusher.wait_event(begun)
        self._taker.wait_event(begun)
        with torch.cuda.stream(self._taker):
            for source, target in zip(leaving[self.rank], arriving[self.rank], strict=True):
                target.copy_(source)
        for begin in range(0, most, self._part):
            self._push(leaving, begin)
            self._take(arriving, begin)
            self._half = 1 - self._half
        touched = [piece for messages in (leaving, arriving) for pieces in messages for piece in pieces]
        return _Arrival(self._taker.record_event(), caller, (self._pusher, self._taker), touched)

    def _push(self, leaving: Messages, begin: int) -> None:
        """Write bytes begin .. begin + part of each message at its receiver, and meet all ranks."""
        with torch.cuda.stream(self._pusher):
            for step in range(1, self.ranks):  # in turn, so that no rank has many senders at a time
                peer = (self.rank + step) % self.ranks
                staged = self._staging[peer][self._half, self._seat(self.rank, peer)]
                for place, piece in cut(leaving[peer], begin, self._part):
                    staged[place : place + len(piece)].copy_(piece)
            # The barrier says as well that the pass before has been taken.
            self._pusher.wait_stream(self._taker)
            self._handle.barrier()

    def _take(self, arriving: Messages, begin: int) -> None:
        """Bring what the others wrote to where it belongs, while the next pass is written."""
        self._taker.wait_stream(self._pusher)
        with torch.cuda.stream(self._taker):
            for step in range(1, self.ranks):
                peer = (self.rank - step) % self.ranks
                staged = self._staging[self.rank][self._half, self._seat(peer, self.rank)]
                for place, piece in cut(arriving[peer], begin, self._part):
                    piece.copy_(staged[place : place + len(piece)])

    def _seat(self, source: int, destination: int) -> int:
        """Which of the R - 1 parts of a half at `destination` belongs to `source`."""
        return (source - destination - 1) % self.ranks


class _Arrival:
    """The end of a transfer. Until it is waited for, nothing that the transfer touches is freed."""

    def __init__(self, done: Any, caller: Any, streams: tuple[Any, ...], touched: Sequence[Tensor]) -> None:
        self._done, self._caller, self._streams, self._touched = done, caller, streams, touched

    def wait(self) -> None:
        """The current stream waits, the host does not."""
        current = torch.cuda.current_stream(self._caller.device)
        current.wait_event(self._done)
        if current == self._caller:
            # Memory is used again in the order of this stream, which is now behind the transfer.
            self._touched = ()

    def __del__(self) -> None:
        for tensor in self._touched:
            for stream in self._streams:
                tensor.record_stream(stream)


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why GPUs of the group cannot write into each other's memory, or None; collective, same on all ranks."""
    lanes = _lanes(group, device, STAGING)
    return lanes if isinstance(lanes, str) else None


_opened: dict[tuple[dist.ProcessGroup, int], tuple[_Lane, _Lane] | str] = {}


def _lanes(group: dist.ProcessGroup, device: torch.device, staging: int) -> tuple[_Lane, _Lane] | str:
    """The lanes of rows and experts, made once for a group; or why there are none. Collective when new."""
    key = group, staging
    if key not in _opened:
        with torch.cuda.device(device):
            _opened[key] = _open(group, torch.device("cuda", torch.cuda.current_device()), staging)
    return _opened[key]


def _open(group: dist.ProcessGroup, device: torch.device, staging: int) -> tuple[_Lane, _Lane] | str:
    """All ranks take each step, or none: a rank that fails alone would leave the others waiting."""
    problem = _apart(group, device)
    if problem is None:
        memory, problem = _allocate(device, staging)
        problem = _agree(group, problem)
    if problem is None:
        lanes, problem = _meet(group, memory)
        problem = _agree(group, problem)
    return lanes if problem is None else problem


def _apart(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the GPUs of the ranks are out of each other's reach, as far as that is known without trying."""
    where: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(where, (socket.gethostname(), device.index), group=group)
    hosts, indices = {host for host, _ in where}, [index for _, index in where]
    if len(hosts) > 1:
        return f"reaches the GPUs of one host, and the ranks are on {len(hosts)}"
    if len(set(indices)) < len(indices):
        return "two ranks have the same device number: let every rank see all GPUs of its host"
    far = [
        index
        for index in indices
        if index != device.index
        and (index >= torch.cuda.device_count() or not torch.cuda.can_device_access_peer(device.index, index))
    ]
    return _agree(group, f"GPU {device.index} cannot reach the memory of GPU {far[0]}" if far else None)


def _allocate(device: torch.device, staging: int) -> tuple[list[Tensor], str | None]:
    """Symmetric memory for two lanes, and what went wrong."""
    try:
        return [
            _SymmetricMemory.empty_strided_p2p((staging,), (1,), torch.uint8, device) for _ in range(2)
        ], None
    except Exception as error:
        return [], f"no symmetric memory: {_line(error)}"


def _meet(group: dist.ProcessGroup, memory: list[Tensor]) -> tuple[Any, str | None]:
    """The two lanes, and what went wrong."""
    try:
        with _multicast_off():
            return tuple(_Lane(group, each) for each in memory), None
    except Exception as error:
        return None, f"symmetric memory is not shared: {_line(error)}"


@contextlib.contextmanager
def _multicast_off() -> Iterator[None]:
    """Without it a rendezvous sets up NVLink multicast, which is not needed here and fails on some hosts."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _agree(group: dist.ProcessGroup, problem: str | None) -> str | None:
    """The problem of the first rank that has one, told to all."""
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    return next((f"{each} (rank {rank})" for rank, each in enumerate(problems) if each), None)


def _line(error: Exception) -> str:
    """The beginning of its message."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def _most(wanted: Wanted, expert: Tensor, places: int) -> int:
    """Bytes of the experts between the two ranks that exchange most; the same both ways."""
    pairs = Counter((rank, each // places) for rank, experts in enumerate(wanted) for each in experts)
    return max(pairs.values(), default=0) * expert.numel() * expert.element_size()


def cut(pieces: Sequence[Tensor], begin: int, length: int) -> Iterator[tuple[int, Tensor]]:
    """What bytes begin .. begin + length of a message consist of: (place behind `begin`, part of a piece)."""
    place = -begin
    for piece in pieces:
        first, last = max(0, -place), min(len(piece), length - place)
        if first < last:
            yield place + first, piece[first:last]
        place += len(piece)


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as uint8 [.]."""
    return tensor.detach().view(-1).view(torch.uint8)

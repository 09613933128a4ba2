"""From the router's choice to everything that moving rows needs: the plan, sizes on the host, index tensors.

A token is sent once to each rank that computes any of its entries: that row is a payload, and carried by the
first of those entries. Letters: R ranks, E experts, P experts at home on a rank, G = 2P segments, S tokens,
K experts of a token, l latent width; u payloads sent, v payloads received, m entries received, n rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .plan import FILL, Plan, Policy, plan
from .transport import Pending, Transport


@dataclass(frozen=True)
class Split:
    """How many rows this rank exchanges with each rank."""

    sent: list[int]
    received: list[int]
    most: int
    """Rows from one rank to another one at most, over all pairs; the same on every rank."""

    @classmethod
    def of(cls, matrix: np.ndarray, rank: int) -> Split:
        """This rank's part of a matrix [R, R] from source to destination."""
        between = matrix - np.diag(np.diag(matrix))
        return cls(matrix[rank].tolist(), matrix[:, rank].tolist(), int(between.max()))

    @property
    def back(self) -> Split:
        """The way back."""
        return Split(self.received, self.sent, self.most)

    def exchange(self, transport: Transport, rows: Tensor, into: Tensor | None = None) -> Pending[Tensor]:
        """See `Transport.exchange`."""
        return transport.exchange(rows, self.sent, self.received, into=into, most=self.most)


@dataclass(frozen=True)
class Sizes:
    """What the host has to know of a plan. Lists over ranks, unless said."""

    entries: Split
    payloads: Split
    slots: list[list[int]]
    """Experts that each rank borrows, in slot order."""
    ends: list[int]
    """[G] padded end of each segment of this rank."""
    loads: list[int]
    """Rows that each rank computes, without padding."""
    home_loads: list[int]
    """Rows that each rank would compute if every expert stayed at home."""
    padded: list[int]
    """Rows of each rank including padding."""
    moved: int
    """Rows of the group that are computed away from home."""

    @property
    def rows(self) -> int:
        """n, rows of this rank including padding."""
        return self.ends[-1]


@dataclass(frozen=True)
class Route:
    """A plan together with the index tensors of this rank; int64 on the device, unless said."""

    plan: Plan
    counts: Tensor
    """[R, E] entries that each source routes to each expert."""
    choice: Tensor
    """[S, K] physical experts, as given."""
    sizes: Sizes
    by_rank: Tensor
    """[S K] this rank's entries in the order in which they leave: by destination, then by token and k."""
    tokens: Tensor
    """[u] the token of each payload sent."""
    payloads_by_token: Tensor
    """[u] the payloads sent, token after token."""
    token_offsets: Tensor
    """[S + 1] where each token's part of them begins."""
    entry_rows: Tensor
    """[m] the row of each entry received."""
    payload_offsets: Tensor
    """[v + 1] where the entries of each payload received begin; they follow each other."""
    row_payloads: Tensor
    """[n] the payload received that fills each row; v for padding."""

    @property
    def token_count(self) -> int:
        """S."""
        return self.choice.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.choice.shape[1]

    @property
    def places(self) -> int:
        """P."""
        return self.plan.places


class Planner:
    """Makes routes for one layer; every call is collective over the group."""

    def __init__(
        self,
        transport: Transport,
        num_experts: int,
        *,
        policy: Policy = FILL,
        pad: int = 1,
        backend: str = "auto",
        equal_tokens: bool = False,
    ) -> None:
        """See `MoonEP` for the arguments."""
        self.transport, self.num_experts, self.policy = transport, num_experts, policy
        self.pad, self.backend, self.equal_tokens = pad, backend, equal_tokens

    def start(self, choice: Tensor) -> Planning:
        """Count, plan and start the copy to the host. choice int [S, K]: physical experts."""
        entries = choice.reshape(-1).long()
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=choice.device)
        counts.scatter_add_(0, entries, torch.ones_like(entries, dtype=torch.int32))
        everywhere = self.transport.gather(counts)  # [R, E]
        clock = Clock(choice.device)
        total = self.transport.ranks * choice.numel() if self.equal_tokens else None
        planned = plan(
            everywhere, choice, self.transport.rank,
            pad=self.pad, policy=self.policy, backend=self.backend, total_rows=total,
        )  # fmt: skip
        clock.stop()
        unique = self.transport.gather(planned.unique.int())  # [R, R]
        home_loads = everywhere.sum(0).view(self.transport.ranks, -1).sum(1)
        own_ends = planned.ends[self.transport.rank]
        wanted = [
            planned.send,
            unique,
            planned.slots,
            own_ends,
            home_loads,
            planned.ends[:, -1],
            planned.moved,
        ]
        return Planning(planned, everywhere, choice, clock, HostCopy([each.int() for each in wanted]))


@dataclass(frozen=True)
class Planning:
    """A plan whose sizes are on their way to the host."""

    plan: Plan
    counts: Tensor
    choice: Tensor
    clock: Clock
    copied: HostCopy

    def finish(self, transport: Transport) -> Route:
        """Wait for the sizes, tell every destination which row each entry takes, and index both sides."""
        sizes = self._sizes(transport.rank)
        assert sizes.rows <= self.plan.stride, (
            "more rows than planned: token counts differ, equal_tokens is set"
        )
        by_rank, tokens, codes = self._leave(sum(sizes.payloads.sent))
        arriving = sizes.entries.exchange(transport, codes)
        by_token = tokens.argsort(stable=True)
        token_offsets = _offsets(tokens[by_token], self.choice.shape[0])
        entry_rows, payload_offsets, row_payloads = _arrive(
            arriving.wait(), sum(sizes.payloads.received), sizes.rows
        )
        return Route(
            self.plan, self.counts, self.choice, sizes, by_rank, tokens, by_token, token_offsets,
            entry_rows, payload_offsets, row_payloads,
        )  # fmt: skip

    def _sizes(self, rank: int) -> Sizes:
        send, unique, slots, ends, home_loads, padded, moved = self.copied.read()
        return Sizes(
            entries=Split.of(send, rank),
            payloads=Split.of(unique, rank),
            slots=[row[row >= 0].tolist() for row in slots],
            ends=ends.tolist(),
            loads=send.sum(0).tolist(),
            home_loads=home_loads.tolist(),
            padded=padded.tolist(),
            moved=int(moved),
        )

    def _leave(self, payloads: int) -> tuple[Tensor, Tensor, Tensor]:
        """`by_rank` and `tokens`, see `Route`, and the code [S K] int32 of each entry in that order.

        A code is the row at the destination; of entries that ride on an earlier payload, -1 - row.
        """
        rows, stride = self.plan.rows, self.plan.stride
        by_rank = (rows // stride).argsort(stable=True)
        first, row = self.plan.first[by_rank], (rows % stride)[by_rank]
        # Entries without a payload are written to one place more; masks would make the host wait.
        place = torch.where(first, first.cumsum(0) - 1, payloads)
        tokens = rows.new_empty(payloads + 1).scatter_(0, place, by_rank // self.choice.shape[1])
        return by_rank, tokens[:-1], torch.where(first, row, -1 - row).int()


def _arrive(codes: Tensor, payloads: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """`entry_rows`, `payload_offsets` and `row_payloads` of received codes; see `Route`."""
    codes = codes.long()
    first = codes >= 0
    entry_rows = torch.where(first, codes, -1 - codes)
    payload = first.cumsum(0) - 1
    row_payloads = codes.new_full((rows,), payloads).scatter_(0, entry_rows, payload)
    return entry_rows, _offsets(payload, payloads), row_payloads


def _offsets(ascending: Tensor, lists: int) -> Tensor:
    """[lists + 1] where each value 0 .. lists - 1 begins in an ascending tensor."""
    return torch.searchsorted(ascending, torch.arange(lists + 1, device=ascending.device))


class HostCopy:
    """Small int32 tensors on their way to the host in one transfer, beside the computation."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._event: Any = None
        if packed.is_cuda:
            stream = _side_stream(packed.device)
            stream.wait_stream(torch.cuda.current_stream(packed.device))
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            with torch.cuda.stream(stream):
                self._host.copy_(packed, non_blocking=True)
                self._event = stream.record_event()
            packed.record_stream(stream)
        else:
            self._host = packed

    def read(self) -> list[np.ndarray]:
        """The tensors as arrays; on a GPU the host waits for the transfer here."""
        if self._event is not None:
            self._event.synchronize()
        pieces = self._host.split([shape.numel() for shape in self._shapes])
        return [piece.view(shape).numpy() for piece, shape in zip(pieces, self._shapes, strict=True)]


class Clock:
    """Time of a stretch of work on the device, from making it to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events: Any = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._seconds = -time.perf_counter()

    def stop(self) -> None:
        """End the stretch."""
        self._seconds += time.perf_counter()
        if self._events:
            self._events[1].record()

    def milliseconds(self) -> float:
        """Its length; on a GPU the host waits until it is over."""
        if self._events:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1]))
        return self._seconds * 1e3


_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]

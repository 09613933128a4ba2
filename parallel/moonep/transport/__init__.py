"""How rows, expert weights and their gradients travel between the ranks of an expert-parallel group.

Every method is a collective: all ranks of the group call the same methods in the same order, whatever each of
them has to send. Letters: R ranks, P experts at home on a rank, n rows, w their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Wanted = Sequence[Sequence[int]]
"""For each rank, the physical experts that it borrows, in the order of its slots; never its own."""


class TransportError(ValueError):
    """A transport that does not exist or cannot run here."""


class Pending[T]:
    """Something on its way. `wait` once, before use; on a GPU the current stream waits, not the host."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], T], kept: Any = None) -> None:
        """`finish` makes the value once all `works` are done; `kept` is what has to stay alive until then."""
        self._works, self._finish, self._kept = works, finish, kept

    def wait(self) -> T:
        """The value, safe to use."""
        for work in self._works:
            work.wait()
        finish = self._finish
        # Who keeps this object does not keep what came, nor the buffers that `finish` has read.
        del self._works, self._finish, self._kept
        return finish()

    def then[U](self, step: Callable[[T], U]) -> Pending[U]:
        """The same arrival, with `step` applied to the value. Replaces this object."""
        finish = self._finish
        return Pending(self._works, lambda: step(finish()), self._kept)


class Transport(Protocol):
    """What the data path asks of a fabric. Transfers start at once and proceed beside the computation."""

    name: str
    ranks: int
    rank: int

    def gather(self, row: Tensor) -> Tensor:
        """row [w] of every rank, as [R, w] in rank order."""
        ...

    def exchange(
        self,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        into: Tensor | None = None,
        most: int | None = None,
    ) -> Pending[Tensor]:
        """Send rows [n, ...], the first sent[0] to rank 0 and so on; receive in rank order.

        `received` are the rows that come from each rank. `into` [sum(received), ...] takes them when given.
        `most`: rows from one rank to another at most, the same on all ranks; of more than two ranks, none
        knows it from its own counts.
        """
        ...

    def fetch_experts(self, wanted: Wanted, own: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """Copies of the experts that this rank wants, one tensor each, from `own`, the P experts at home.

        May run beside `exchange`. All experts have one shape and dtype.
        """
        ...

    def return_gradients(
        self, wanted: Wanted, gradients: Sequence[Tensor], places: int, like: Tensor
    ) -> Pending[list[list[Tensor]]]:
        """Send home the gradients of what `fetch_experts` brought; may run beside `exchange`.

        All gradients have the shape and dtype of `like`. Returns for each of the P = `places` experts at home
        what other ranks computed, in rank order.
        """
        ...


@dataclass(frozen=True)
class Choice:
    """The transport that was taken, and why each other one was not."""

    name: str
    reasons: dict[str, str]


def why_not(name: str, group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Why a transport cannot serve this group, or None. The same on every rank; may be a collective."""
    if name == "collective":
        return None
    if device.type != "cuda":
        return f"reaches into the memory of GPUs, and this run is on {device.type}"
    if group is None or dist.get_world_size(group) == 1:
        return "one rank has no peer"
    from .peer import why_not as reason

    return reason(group, device)


def choose(requested: str, group: dist.ProcessGroup | None, device: torch.device) -> Choice:
    """Take the transport `requested`, or with "auto" the fastest that can run.

    Raises:
        TransportError: it is unknown or cannot run here.
    """
    if requested not in ("auto", *_FASTEST_FIRST):
        raise TransportError(f"parallel.expert.transport={requested}: use auto, {', '.join(_FASTEST_FIRST)}")
    if requested == "auto":
        found = {name: why_not(name, group, device) for name in _FASTEST_FIRST}
        name = next(name for name, reason in found.items() if reason is None)
        others = {other: reason or f"slower than {name}" for other, reason in found.items() if other != name}
        return Choice(name, others)
    if reason := why_not(requested, group, device):
        raise TransportError(f"parallel.expert.transport={requested}: {reason}; use auto or collective")
    return Choice(requested, {name: "not asked for" for name in _FASTEST_FIRST if name != requested})


def open_transport(
    requested: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    expert_group: dist.ProcessGroup | None = None,
) -> Transport:
    """The transport that `choose` takes, ready for use; a collective over the group. None is a single rank.

    `expert_group` has the same ranks: a second communicator, in which experts travel beside rows.

    Raises:
        TransportError: see `choose`.
    """
    if choose(requested, group, device).name == "peer":
        assert group is not None
        from .peer import PeerTransport

        return PeerTransport(group, device)
    from .collective import CollectiveTransport

    return CollectiveTransport(group, device, expert_group)


_FASTEST_FIRST = ("peer", "collective")

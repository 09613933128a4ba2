"""Context parallelism of Kimi Delta Attention: the state on its way from rank to rank.

A rank's columns of a row act on the state that comes from the left as S -> M S + E, however many they are.
All ranks exchange their maps [E | M] once, in messages of a fixed size; each composes those before it into
the state that it starts from and runs its own columns from there. Backward is the mirror: dS -> M^T dS + dE,
from the last rank down. Where a document starts nothing crosses: at the start of a share the state is
dropped, and a share with a border inside has M = 0. K3 report (arXiv:2607.24653); Kimi Linear
(arXiv:2510.26692).

Letters: N ranks, b batch, H heads, D key head dim, Dv value head dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.exchange import gather_columns

from ..packing import Packing

STATE = "kda.state"
"""Name of the exchange in `parallel.context.exchange.traffic`."""


@dataclass(frozen=True, eq=False)
class Handover:
    """Between which shares of the rows the state passes."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    crosses: Tensor  # [N, b, 1, 1, 1] bool, a rank's first token continues the document of the one before

    @classmethod
    def of(cls, packing: Packing) -> Handover | None:
        """Of a packing with a span; None without. Made once for each packing."""
        span = packing.span
        if span is None:
            return None
        if packing not in _handovers:
            crosses = continued(span.whole.document_ids, span.starts)[..., None, None, None]
            _handovers[packing] = cls(span.group, span.rank, span.size, crosses)
        return _handovers[packing]

    def gather(self, maps: Tensor, *, backward: bool = False) -> Tensor:
        """Every rank's [E | M], from this one's: [b, H, D, Dv + D] -> [N, b, H, D, Dv + D]."""
        starts = range(self.ranks + 1)
        name = f"{STATE}.backward" if backward else STATE
        return gather_columns(maps[None], starts, self.group, dim=0, name=name)

    def incoming(self, maps: Tensor) -> Tensor:
        """The state that this rank's columns start from [b, H, D, Dv], of all maps [N, b, H, D, Dv + D]."""
        before = range(self.rank)
        return _composed(maps, ((rank, self.crosses[rank + 1]) for rank in before))

    def outgoing_gradient(self, maps: Tensor) -> Tensor:
        """Gradient of the state behind this rank's columns [b, H, D, Dv], of all [dE | M^T]."""
        behind = range(self.ranks - 1, self.rank, -1)
        return _composed(maps, ((rank, self.crosses[rank]) for rank in behind))


_handovers: WeakKeyDictionary[Packing, Handover] = WeakKeyDictionary()


def continued(document_ids: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Whether each share's first token continues the document of the token before it: bool [N, b].

    document_ids: of the whole rows [b, S]; starts: columns where shares start, and S.
    """
    assert all(start < stop for start, stop in pairwise(starts)), f"a rank without tokens: {starts}"
    first = torch.zeros_like(document_ids[:, 0], dtype=torch.bool)
    inner = (document_ids[:, start] == document_ids[:, start - 1] for start in starts[1:-1])
    return torch.stack([first, *inner])


def reach(document_ids: Tensor, starts: tuple[int, ...], rank: int) -> list[tuple[int, int]]:
    """For each row how many ranks before hold some of the document of this rank's first token, and how many
    behind some of its last token's. document_ids: of the whole rows [b, S]; read from the device once.
    """
    edges = [column for start, stop in pairwise(starts) for column in (start, stop - 1)]
    found = []
    for row in document_ids[:, edges].tolist():
        first, last = row[::2], row[1::2]
        found.append((last[:rank].count(first[rank]), first[rank + 1 :].count(last[rank])))
    return found


def _composed(maps: Tensor, order: Iterable[tuple[int, Tensor]]) -> Tensor:
    """The zero state through the maps of ranks in this order; kept behind each where its mask is True."""
    D, width = maps.shape[-2:]
    # Zeros, in the graph of the maps: their backward is a collective.
    state = maps[:0, ..., : width - D].sum(0)
    for rank, kept in order:
        made, transition = maps[rank].split((width - D, D), dim=-1)
        state = torch.where(kept, torch.matmul(transition, state) + made, 0)
    return state

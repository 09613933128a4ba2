"""Rows by all-to-all, experts by point-to-point transfers: gloo, NCCL, whatever torch.distributed knows.

Letters: R ranks, P experts at home on a rank, n rows, w their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import Pending, Wanted

_ROUNDS = 1 << 12
_MOST_SLOTS = 1 << 16


class CollectiveTransport:
    """See `Transport`. Experts travel beside the rows where they have a communicator of their own."""

    name = "collective"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        expert_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`expert_group`: the same ranks again; collective over them."""
        self.group, self.device = group, device
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._expert_group = expert_group or group
        if expert_group is not None and self.ranks > 1:
            # Later batches leave some ranks out, which NCCL allows only once all have met.
            dist.all_reduce(torch.zeros(1, device=device), group=expert_group)
        self._round = 0

    def gather(self, row: Tensor) -> Tensor:
        """See `Transport.gather`."""
        if self.ranks == 1:
            return row[None]
        gathered = row.new_empty(self.ranks * row.numel())
        dist.all_gather_into_tensor(gathered, row.contiguous(), group=self.group)
        return gathered.view(self.ranks, -1)

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
        if self.ranks == 1:
            target.copy_(rows)
            return Pending((), lambda: target)
        rows = rows.contiguous()
        work = dist.all_to_all_single(
            target, rows, list(received), list(sent), group=self.group, async_op=True
        )
        return Pending([work], lambda: target, kept=rows)

    def fetch_experts(self, wanted: Wanted, own: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """See `Transport.fetch_experts`. The copies lie side by side in one storage."""
        places, mine = len(own), wanted[self.rank]
        slots = list(own[0].new_empty(len(mine), *own[0].shape))
        arriving = [
            (expert // places, slot, at) for slot, (expert, at) in enumerate(zip(mine, slots, strict=True))
        ]
        leaving = [
            (rank, slot, own[expert % places])
            for rank, experts in enumerate(wanted)
            for slot, expert in enumerate(experts)
            if expert // places == self.rank
        ]
        return Pending(self._transfer(leaving, arriving), lambda: slots, kept=leaving)

    def return_gradients(
        self, wanted: Wanted, gradients: Sequence[Tensor], places: int, like: Tensor
    ) -> Pending[list[list[Tensor]]]:
        """See `Transport.return_gradients`."""
        leaving = [
            (expert // places, slot, gradient.contiguous())
            for slot, (expert, gradient) in enumerate(zip(wanted[self.rank], gradients, strict=True))
        ]
        home: list[list[Tensor]] = [[] for _ in range(places)]
        arriving = []
        for rank, experts in enumerate(wanted):
            for slot, expert in enumerate(experts):
                if expert // places == self.rank:
                    piece = torch.empty_like(like, memory_format=torch.contiguous_format)
                    home[expert % places].append(piece)
                    arriving.append((rank, slot, piece))
        return Pending(self._transfer(leaving, arriving), lambda: home, kept=leaving)

    def _transfer(
        self, leaving: list[tuple[int, int, Tensor]], arriving: list[tuple[int, int, Tensor]]
    ) -> list[Any]:
        """Post (peer, slot, tensor) sends and receives; a pair of ranks agrees on both lists and their order.

        gloo matches by tag, NCCL by order within the batch.
        """
        base = self._round * _MOST_SLOTS
        self._round = (self._round + 1) % _ROUNDS
        posts = [(dist.isend, *each) for each in leaving] + [(dist.irecv, *each) for each in arriving]
        if not posts:
            return []
        assert self._expert_group is not None
        operations = [
            dist.P2POp(post, tensor, group=self._expert_group, tag=base + slot, group_peer=peer)
            for post, peer, slot, tensor in posts
        ]
        return dist.batch_isend_irecv(operations)

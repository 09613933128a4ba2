"""What a plan consists of.

Letters: R ranks of the expert-parallel group, E routed experts, P = E/R experts at home on a rank, S tokens
of this rank, K experts of a token, G = 2P segments of a rank: its own P experts by place, then P slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Tables(NamedTuple):
    """Where the rows of an allocation lie; int32, the same on every rank. See `Plan`."""

    slots: Tensor
    ends: Tensor
    starts: Tensor
    send: Tensor


@dataclass(frozen=True)
class Plan:
    """Which rank computes which entries, and in which rows. Physical expert x lives on rank x // P.

    All tensors but `rows` and `first` are int32 and the same on every rank of the group.
    """

    alloc: Tensor
    """[R, E] rows of expert e computed on rank d."""
    slots: Tensor
    """[R, P] physical expert in each slot, ascending, then -1."""
    ends: Tensor
    """[R, G] padded end of each segment; an empty one repeats the end before it."""
    starts: Tensor
    """[R, E] first row of an expert on a rank; 0 where it has none there."""
    send: Tensor
    """[R, R] entries that source r sends to destination d."""
    rows: Tensor
    """int64 [S * K]: destination * stride + row on it, for this rank's entry i = t * K + k."""
    first: Tensor
    """bool [S * K]: the first entry of its token on that destination, in the order of k.

    Under de-duplication it carries the payload. How many such entries each pair of ranks has cannot be told
    from counts: the source counts its own (`unique`); the destination counts them among the indices that it
    receives, or the sources exchange one row of [R] each."""
    stride: int
    """Rows that the buffer of a rank holds."""
    pad: int
    """Each segment that is not empty is rounded up to a multiple of this many rows."""
    rank: int

    @property
    def ranks(self) -> int:
        """R."""
        return self.alloc.shape[0]

    @property
    def experts(self) -> int:
        """E."""
        return self.alloc.shape[1]

    @property
    def places(self) -> int:
        """P, experts at home on a rank; as many slots."""
        return self.experts // self.ranks

    @property
    def replicas(self) -> Tensor:
        """[R] slots in use, int64."""
        return (self.slots >= 0).sum(1)

    @property
    def load(self) -> Tensor:
        """[R] rows of each rank without padding, int64."""
        return self.alloc.sum(1)

    @property
    def moved(self) -> Tensor:
        """[] rows computed away from the home of their expert, int64."""
        return self.alloc.sum() - at_home(self.alloc).sum()

    @property
    def unique(self) -> Tensor:
        """[R] entries of this rank that are the first of their token on a destination, int64."""
        counted = torch.zeros(self.ranks, dtype=torch.int64, device=self.rows.device)
        return counted.index_add_(0, self.rows // self.stride, self.first.long())


def stay(load: Tensor, ranks: int) -> Tensor:
    """Loads [E] to alloc [R, E] that leaves every row at the home of its expert."""
    home = torch.arange(len(load), device=load.device) // (len(load) // ranks)
    return load * (home == torch.arange(ranks, device=load.device)[:, None])


def at_home(alloc: Tensor) -> Tensor:
    """[R, E] to [R, P]: what each rank computes of its own experts."""
    ranks, experts = alloc.shape
    return alloc.view(ranks, ranks, experts // ranks).diagonal().t()

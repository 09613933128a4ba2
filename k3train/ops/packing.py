"""Where documents begin and end in a packed batch.

Letters: b batch, s sequence, n documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Span:
    """Where a rank's columns lie in whole rows, which are spread over a context group."""

    group: dist.ProcessGroup
    starts: tuple[int, ...]
    """Column at which each rank's share starts, and the length of the rows."""
    whole: Packing
    """Of the whole rows [b, S]."""

    @cached_property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.starts) - 1

    @property
    def start(self) -> int:
        """First column of this rank."""
        return self.starts[self.rank]

    @property
    def stop(self) -> int:
        """Behind the last column of this rank."""
        return self.starts[self.rank + 1]


@dataclass(frozen=True, eq=False)
class Packing:
    """Document borders of one micro-batch; no operator looks across them.

    With a `span`, of this rank's columns of it: documents keep the numbers that they have in the whole rows,
    and `cu_seqlens` and `max_seqlen` are those of the fragments that lie here.
    """

    document_ids: Tensor  # [b, s] int32, non-decreasing along a row
    cu_seqlens: Tensor  # [n + 1] int32, over the b*s tokens row by row
    max_seqlen: int
    span: Span | None = None

    @classmethod
    def from_tokens(cls, tokens: Tensor, eod_id: int) -> Packing:
        """Cut `tokens` [b, s] behind every `eod_id`. Reads the device once, for the two sizes."""
        first = torch.ones_like(tokens, dtype=torch.bool)
        first[:, 1:] = tokens[:, :-1] == eod_id
        return cls((first.cumsum(1) - 1).int(), *_fragments(first))

    @classmethod
    def single(cls, b: int, s: int, device: torch.device | str) -> Packing:
        """One document per row."""
        cu_seqlens = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=device)
        return cls(torch.zeros(b, s, dtype=torch.int32, device=device), cu_seqlens, s)

    def shard(self, group: dist.ProcessGroup, starts: Sequence[int]) -> Packing:
        """Of the columns that this rank of a context group holds; the packing itself is of whole rows."""
        assert self.span is None and starts[-1] == self.document_ids.shape[1]
        span = Span(group, tuple(starts), self)
        ids = self.document_ids[:, span.start : span.stop].contiguous()
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        return Packing(ids, *_fragments(first), span)

    def to(self, device: torch.device) -> Packing:
        """The same with its tensors on `device`."""
        span = self.span and Span(self.span.group, self.span.starts, self.span.whole.to(device))
        ids, borders = (x.to(device, non_blocking=True) for x in (self.document_ids, self.cu_seqlens))
        return Packing(ids, borders, self.max_seqlen, span)

    @property
    def whole_rows(self) -> bool:
        """Every row is one document."""
        return self.cu_seqlens.numel() == self.document_ids.shape[0] + 1

    @cached_property
    def cu_seqlens_int64(self) -> Tensor:
        """`cu_seqlens` as flash-linear-attention takes them: the same tensor every time.

        It remembers what it makes of them by that, and waits for the device where it has to make it anew.
        """
        return self.cu_seqlens.long()

    @cached_property
    def attention_mask(self) -> Tensor:
        """True where a query may see a key: same document, not later. [b, 1, s, s] bool."""
        same = self.document_ids[:, :, None] == self.document_ids[:, None, :]  # [b, s, s]
        return same.tril()[:, None]


def _fragments(first: Tensor) -> tuple[Tensor, int]:
    """`cu_seqlens` and `max_seqlen` of rows in which a fragment starts where `first` [b, s] is True."""
    tokens = first.numel()
    position = torch.arange(tokens, device=first.device)
    start = torch.where(first.flatten(), position, 0).cummax(0).values  # [b*s]
    fragment = first.flatten().cumsum(0) - 1  # [b*s]
    last, longest = torch.stack((fragment[-1], (position - start).max())).tolist()
    cu_seqlens = torch.full((last + 2,), tokens, dtype=torch.int32, device=first.device)
    cu_seqlens.scatter_(0, fragment, start.int())
    return cu_seqlens, longest + 1

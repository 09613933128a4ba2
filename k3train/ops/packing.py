"""Where documents begin and end in a packed batch.

Letters: b batch, s sequence, n documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """Document borders of one micro-batch; no operator looks across them."""

    document_ids: Tensor  # [b, s] int32, non-decreasing along a row
    cu_seqlens: Tensor  # [n + 1] int32, over the b*s tokens row by row
    max_seqlen: int

    @classmethod
    def from_tokens(cls, tokens: Tensor, eod_id: int) -> Packing:
        """Cut `tokens` [b, s] behind every `eod_id`. Reads the device once, for the two sizes."""
        b, s = tokens.shape
        first = torch.ones_like(tokens, dtype=torch.bool)
        first[:, 1:] = tokens[:, :-1] == eod_id
        position = torch.arange(b * s, device=tokens.device)
        start = torch.where(first.flatten(), position, 0).cummax(0).values  # [b*s]
        document = first.flatten().cumsum(0) - 1  # [b*s]
        last, longest = torch.stack((document[-1], (position - start).max())).tolist()
        cu_seqlens = torch.full((last + 2,), b * s, dtype=torch.int32, device=tokens.device)
        cu_seqlens.scatter_(0, document, start.int())
        return cls((first.cumsum(1) - 1).int(), cu_seqlens, longest + 1)

    @classmethod
    def single(cls, b: int, s: int, device: torch.device | str) -> Packing:
        """One document per row."""
        cu_seqlens = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=device)
        return cls(torch.zeros(b, s, dtype=torch.int32, device=device), cu_seqlens, s)

    @property
    def whole_rows(self) -> bool:
        """Every row is one document."""
        return self.cu_seqlens.numel() == self.document_ids.shape[0] + 1

    @cached_property
    def attention_mask(self) -> Tensor:
        """True where a query may see a key: same document, not later. [b, 1, s, s] bool."""
        same = self.document_ids[:, :, None] == self.document_ids[:, None, :]  # [b, s, s]
        return same.tril()[:, None]

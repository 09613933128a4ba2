"""Queries that see more keys than there are of them: what a rank attends to of rows that others hold too.

Letters: n queries, m keys, f fragments. Both lie fragment by fragment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from ..packing import Packing

LONG = 8192
"""Queries of a fragment from which on kernels of its own pay."""


@dataclass(frozen=True, eq=False)
class Fragments:
    """Parts of documents. The last query of each sees all its keys, the one before it one less, and so on.

    In the place of a `Packing` it goes with queries [1, n, H, D], keys and values [1, m, H, D].
    """

    lengths: tuple[tuple[int, int], ...]
    """Queries and keys of each fragment, at least one query and no fewer keys."""
    cu_seqlens_q: Tensor  # [f + 1] int32
    cu_seqlens_k: Tensor  # [f + 1] int32

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]], device: torch.device | str) -> Fragments:
        """From the number of queries and of keys of each."""
        assert lengths and all(1 <= queries <= keys for queries, keys in lengths)
        borders = torch.tensor([(0, 0), *lengths]).cumsum(0).int().T.contiguous()  # [2, f + 1]
        return cls(tuple(lengths), *borders.to(device))

    @property
    def whole_rows(self) -> bool:
        """As `Packing.whole_rows`: they are not square."""
        return False

    @cached_property
    def max_seqlen_q(self) -> int:
        """Most queries of a fragment."""
        return max(queries for queries, _ in self.lengths)

    @cached_property
    def max_seqlen_k(self) -> int:
        """Most keys of a fragment."""
        return max(keys for _, keys in self.lengths)

    @cached_property
    def seen(self) -> tuple[Tensor, Tensor]:
        """The first and the last key that each query sees: [n] each."""
        queries, keys = self.cu_seqlens_q, self.cu_seqlens_k
        counts = queries.diff()
        place = torch.arange(self.host_borders[0][-1], device=queries.device)
        last = place + (keys[1:] - queries[1:]).repeat_interleave(counts)
        return keys[:-1].repeat_interleave(counts), last

    @cached_property
    def attention_mask(self) -> Tensor:
        """True where a query may see a key. [1, 1, n, m] bool."""
        return self.mask(slice(None), slice(0, self.host_borders[1][-1]))[None, None]

    def mask(self, queries: slice, keys: slice) -> Tensor:
        """Of some queries and keys, by their places: bool, queries by keys."""
        first, last = (side[queries, None] for side in self.seen)
        key = torch.arange(keys.start, keys.stop, device=first.device)
        return (key >= first) & (key <= last)

    @cached_property
    def stretches(self) -> list[tuple[slice, slice, Fragments | None]]:
        """Places of queries and keys of each long fragment (None), and of each stretch of others."""
        found: list[tuple[slice, slice, Fragments | None]] = []
        queries = keys = 0
        for is_long, group in groupby(self.lengths, lambda each: each[0] >= LONG):
            together = list(group)
            for part in [[each] for each in together] if is_long else [together]:
                n, m = (sum(side) for side in zip(*part, strict=True))
                inner = None if is_long else Fragments.of(part, self.cu_seqlens_q.device)
                found.append((slice(queries, queries + n), slice(keys, keys + m), inner))
                queries, keys = queries + n, keys + m
        return found

    @cached_property
    def host_borders(self) -> tuple[list[int], list[int]]:
        """`cu_seqlens_q` and `cu_seqlens_k`."""
        queries, keys = zip(*self.lengths, strict=True)
        return [0, *accumulate(queries)], [0, *accumulate(keys)]

    def keys_of(self, start: int, stop: int) -> slice:
        """The places of the keys between the first and the last one that queries `start` to `stop` see."""
        queries, keys = self.host_borders
        first, last = (bisect_right(queries, place) for place in (start, stop - 1))
        return slice(keys[first - 1], keys[last] - (queries[last] - stop))


def borders(packing: Packing | Fragments) -> tuple[Tensor, Tensor, int, int]:
    """`cu_seqlens` of queries and of keys, and the most of each: what variable-length kernels take."""
    if isinstance(packing, Fragments):
        return packing.cu_seqlens_q, packing.cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k
    return packing.cu_seqlens, packing.cu_seqlens, packing.max_seqlen, packing.max_seqlen

"""Gated MLA of rows that a context group shares: latents gathered, queries dealt by cost, outputs sent home.

The normed latents of keys and values of whole rows come to every rank: they are narrow, and each rank expands
from them what its queries see, for a few heads at a time. Queries travel as normed latents to the rank that
`context_plan.deal` chose, and their outputs back.

A region must not run a collective again that the region of another rank does not: `offload.sites.collective`
sees to it. Of the regions here only `mla.key` has one, so queries that have travelled are kept as they are.

Letters as in `mla`, and S columns of whole rows, C width of the gathered latents (kv_lora_rank + X),
L q_lora_rank, n queries that this rank computes, m keys that they see, h heads at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from offload.sites import collective, region
from parallel.context.exchange import exchange_rows, gather_columns

from ..config import ModelConfig
from ..context_plan import Block, Deal, deal, heads_at_once, joined, key_cost
from ..ops.attention import Fragments
from ..ops.packing import Span

QUERIES, KEYS, OUTPUTS = "mla.queries", "mla.keys", "mla.outputs"
"""Names of the exchanges, in the order of their first use."""

Attend = Callable[[slice, Fragments, Tensor, Tensor, Tensor], Tensor]
"""Of the heads of a slice, queries [1, n, h, N + X] and keys and values [1, m, h, ...]: [1, n, h, V]."""


def attend_across(
    model: ModelConfig,
    span: Span,
    queries: Tensor,  # [b, s, L] normed
    keys: Tensor,  # [b, s, C]
    normed: Callable[[Tensor], Tensor],  # of keys
    weights: tuple[Tensor, Tensor],  # [H * (N + X), L], [H * (N + V), kv_lora_rank]
    attend: Attend,
) -> Tensor:
    """Attention outputs of this rank's tokens: [b, s, H, V].

    Args:
        normed: called in region `mla.key`, and again in backward if that is recomputed.
        attend: called for one group of heads after the other.
    """
    share = assignment(model, span)
    rows = share.send(queries.flatten(0, 1))  # [n, L]

    def gather(keys: Tensor) -> Tensor:
        return collective(gather_columns(normed(keys), span.starts, span.group, dim=1, name=KEYS))

    gathered = region("mla.key", gather, keys)  # [b, S, C]
    heads = heads_at_once(model, share.most_keys, gathered.element_size())
    by_heads = [weight.unflatten(0, (model.num_heads, -1)).split(heads) for weight in weights]
    groups = [tuple(weight.flatten(0, 1) for weight in group) for group in zip(*by_heads, strict=True)]
    sums = _Sum(len(groups)), _Sum(len(groups))
    outputs = []
    for index, (query_weight, key_weight) in enumerate(groups):
        query = region("mla.query", partial(_queries, heads, sums[0]), rows, query_weight)
        expand = partial(_keys_values, model, share.key_ranges, heads, sums[1])
        key, value = region("mla.key", expand, gathered, key_weight)
        now = slice(index * heads, (index + 1) * heads)
        outputs.append(attend(now, share.fragments, query, key, value))
    attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    b, s = queries.shape[:2]
    return share.send_home(attended[0]).unflatten(0, (b, s))


@dataclass(frozen=True, eq=False)
class Assignment:
    """What one rank does for itself and others, from the deal that all ranks have made alike."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    moves: bool
    """Whether any rank has something to send."""
    home: tuple[tuple[int, int], ...]
    """(tokens, rank that computes them) of the blocks that its tokens are cut into, row by row."""
    computed: tuple[tuple[int, int], ...]
    """(tokens, rank that holds them) of the blocks that it computes, by row and column."""
    key_ranges: tuple[tuple[int, int, int], ...]
    """(row, first column, behind the last one) of the keys that they see."""
    fragments: Fragments
    most_keys: int
    """Keys of the rank that sees most."""

    def send(self, x: Tensor) -> Tensor:
        """Its tokens [b * s, ...] to the tokens that it computes [n, ...]."""
        return self._exchanged(x, self.home, self.computed, QUERIES) if self.moves else x

    def send_home(self, x: Tensor) -> Tensor:
        """What it has computed [n, ...] to what others have computed of its tokens [b * s, ...]."""
        return self._exchanged(x, self.computed, self.home, OUTPUTS) if self.moves else x

    def _exchanged(
        self, x: Tensor, given: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]], name: str
    ) -> Tensor:
        """Blocks of x, in order (rows, other rank) `given`, exchanged for blocks in order `taken`.

        Blocks between the same two ranks are in the same order in both; what a rank has for itself stays.
        """
        send, receive = ([0] * self.ranks for _ in range(2))
        leaving: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for part, (rows, rank) in zip(x.split([rows for rows, _ in given]), given, strict=True):
            leaving[rank].append(part)
            send[rank] += rows * (rank != self.rank)
        kept, leaving[self.rank] = leaving[self.rank], []
        for rows, rank in taken:
            receive[rank] += rows * (rank != self.rank)
        moved = [part for parts in leaving for part in parts]
        arrived = collective(exchange_rows(torch.cat([x[:0], *moved]), send, receive, self.group, name=name))
        arriving = [
            iter(kept if rank == self.rank else part.split([rows for rows, other in taken if other == rank]))
            for rank, part in enumerate(arrived.split(receive))
        ]
        # The empty part keeps the exchange in the graph of a rank that gets nothing: backward is one, too.
        return torch.cat([*(next(arriving[rank]) for _, rank in taken), arrived[:0]])


_assignments: WeakKeyDictionary[Span, Assignment] = WeakKeyDictionary()


def assignment(model: ModelConfig, span: Span) -> Assignment:
    """This rank's part in the attention of a micro-batch. Reads the device once, for the documents."""
    if span not in _assignments:
        documents = span.whole.cu_seqlens.tolist()
        rows = span.whole.document_ids.shape[0]
        dealt = deal(documents, rows, span.starts, key_cost(model))
        _assignments[span] = assign(dealt, span, documents)
    return _assignments[span]


def assign(dealt: Deal, span: Span, documents: Sequence[int]) -> Assignment:
    """Of this rank."""
    own, length = dealt.computed[span.rank], span.starts[-1]
    home = sorted(
        (block.row, block.start, block.tokens, rank)
        for rank, blocks in enumerate(dealt.computed)
        for block in blocks
        if block.home == span.rank
    )
    whole = joined(own)
    return Assignment(
        span.group,
        span.rank,
        span.size,
        dealt.moves,
        tuple((tokens, rank) for _, _, tokens, rank in home),
        tuple((block.tokens, block.home) for block in own),
        tuple((block.row, block.keys, block.stop) for block in whole),
        Fragments.of(fragment_lengths(whole, documents, length), span.whole.cu_seqlens.device),
        max(dealt.key_rows),
    )


def fragment_lengths(blocks: Sequence[Block], documents: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Queries and keys of each part of a document that blocks consist of; rows have `length` columns."""
    found = []
    inner = iter(documents)
    border = next(inner)
    for block in blocks:
        first, stop = (block.row * length + column for column in (block.start, block.stop))
        while border <= first:
            border = next(inner)
        cuts = [first]
        while border < stop:
            cuts.append(border)
            border = next(inner)
        lengths = [z - a for a, z in pairwise([*cuts, stop])]
        found += [(lengths[0], lengths[0] + block.start - block.keys), *((n, n) for n in lengths[1:])]
    return found


def _queries(heads: int, total: _Sum, rows: Tensor, weight: Tensor) -> Tensor:
    """[1, n, h, N + X] from rows [n, L]."""
    query: Tensor = _Product.apply(rows, weight, total)
    return query.unflatten(-1, (heads, -1))[None]


def _keys_values(
    model: ModelConfig,
    ranges: Sequence[tuple[int, int, int]],
    heads: int,
    total: _Sum,
    gathered: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keys [1, m, h, N + X] and values [1, m, h, V] of the ranges, from the latents of whole rows."""
    key, value = _Expansion.apply(gathered, weight, model, tuple(ranges), heads, total)
    return key[None], value[None]


def keys_values_reference(
    model: ModelConfig, ranges: Sequence[tuple[int, int, int]], heads: int, gathered: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """[m, h, N + X] and [m, h, V], differentiated by autograd."""
    latent, extra = _taken(gathered, ranges).split((model.kv_lora_rank, model.qk_extra_head_dim), dim=-1)
    expanded = linear(latent, weight).unflatten(-1, (heads, -1))  # [m, h, N + V]
    nope, value = expanded.split((model.qk_nope_head_dim, model.v_head_dim), dim=-1)
    return torch.cat((nope, extra[:, None].expand(-1, heads, -1)), dim=-1), value.contiguous()


class _Sum:
    """What groups of heads say of one gradient, added in FP32 or wider; who comes last takes it away."""

    def __init__(self, groups: int) -> None:
        self._groups = self._missing = groups
        self._total: Tensor | None = None

    def into(self, like: Tensor) -> Tensor:
        """Where to add."""
        if self._total is None:
            wide = torch.promote_types(like.dtype, torch.float32)
            self._total = torch.zeros(like.shape, dtype=wide, device=like.device)
        return self._total

    def end(self, dtype: torch.dtype) -> Tensor | None:
        """The sum if all have added, else None, which autograd takes for nothing."""
        self._missing -= 1
        if self._missing:
            return None
        assert self._total is not None
        total, self._total, self._missing = self._total, None, self._groups
        return total.to(dtype)


class _Product(torch.autograd.Function):
    """x [n, L] by weight [o, L]; the gradient of x is a part of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: _Sum) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        ctx.total.into(x).add_(grad @ weight)
        return ctx.total.end(x.dtype), grad.T @ x, None


class _Expansion(torch.autograd.Function):
    """Keys and values of some heads, from latents of whole rows, which are all that it keeps."""

    @staticmethod
    def forward(
        ctx: Any,
        gathered: Tensor,  # [b, S, C]
        weight: Tensor,  # [h * (N + V), kv_lora_rank]
        model: ModelConfig,
        ranges: tuple[tuple[int, int, int], ...],
        heads: int,
        total: _Sum,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(gathered, weight)
        ctx.model, ctx.ranges, ctx.total = model, ranges, total
        return keys_values_reference(model, ranges, heads, gathered, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, weight = ctx.saved_tensors
        grad_key, grad_value = grads
        nope = ctx.model.qk_nope_head_dim
        latent = _taken(gathered, ctx.ranges)[:, : ctx.model.kv_lora_rank]
        product = torch.cat((grad_key[..., :nope], grad_value), dim=-1).flatten(1)  # [m, h * (N + V)]
        rows = torch.cat((product @ weight, grad_key[..., nope:].sum(1)), dim=-1)  # [m, C]
        total = ctx.total.into(gathered)
        parts = rows.split([stop - start for _, start, stop in ctx.ranges])
        for (row, start, stop), part in zip(ctx.ranges, parts, strict=True):
            total[row, start:stop] += part
        return ctx.total.end(gathered.dtype), product.T @ latent, None, None, None, None


def _taken(gathered: Tensor, ranges: Sequence[tuple[int, int, int]]) -> Tensor:
    """[m, C] of latents [b, S, C]."""
    parts = [gathered[row, start:stop] for row, start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)

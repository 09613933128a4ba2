"""How a context group shares the attention of whole rows: blocks of queries dealt to ranks, and the memory.

Ranks hold contiguous shares of a row, and late tokens see more keys than early ones. So shares are cut into
blocks of queries, and blocks are dealt to ranks by cost. A rank gets about as many tokens as it holds, for
what it keeps of them for backward is as large. All ranks calculate the same, on the host. No torch.

Letters: N ranks, b rows, S columns of a row, H heads. Flat places count the b*S tokens row by row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from .config import Config, ModelConfig
from .shapes import BYTES, model_dtype

FINENESS = (2, 4, 8)
"""Blocks of a rank that are tried; more balance better and expand more keys."""
WORTH_MOVING = 1.05
"""Blocks stay at home where dealing them would not make the slowest rank faster by this factor."""
KEY_BYTES = 2 << 30
"""Of expanded keys and values at a time, unless those of a single head take more."""


class Block(NamedTuple):
    """Queries of one row that are computed on one rank."""

    row: int
    start: int
    stop: int
    """Columns of its queries."""
    keys: int
    """First column that one of them sees: they see no others than up to `stop`."""
    home: int
    """Rank that holds its tokens."""
    cost: int
    """Pairs of a query and a key that it sees."""

    @property
    def tokens(self) -> int:
        """Its queries."""
        return self.stop - self.start


@dataclass(frozen=True)
class Deal:
    """Which rank computes which queries."""

    computed: tuple[tuple[Block, ...], ...]
    """Blocks of each rank, by row and column."""
    contiguous: tuple[int, ...]
    """Pairs of each rank, if it computed what it holds."""

    @property
    def costs(self) -> tuple[int, ...]:
        """Pairs of each rank."""
        return tuple(sum(block.cost for block in blocks) for blocks in self.computed)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Queries of each rank."""
        return tuple(sum(block.tokens for block in blocks) for blocks in self.computed)

    @cached_property
    def key_rows(self) -> tuple[int, ...]:
        """Keys that each rank expands."""
        return tuple(sum(block.stop - block.keys for block in joined(blocks)) for blocks in self.computed)

    @cached_property
    def moves(self) -> bool:
        """Whether any block is computed away from home."""
        return self.moved_tokens > 0

    @property
    def moved_tokens(self) -> int:
        """Queries that travel."""
        return sum(
            block.tokens
            for rank, blocks in enumerate(self.computed)
            for block in blocks
            if block.home != rank
        )


def imbalance(costs: Sequence[int]) -> float:
    """Largest over mean: how much longer the slowest rank takes than an even share."""
    return max(costs) * len(costs) / sum(costs)


def joined(blocks: Iterable[Block]) -> list[Block]:
    """Blocks by row and column with neighbours made one: they share their keys. `home` means nothing then."""
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and (last.row, last.stop) == (block.row, block.start):
            found[-1] = last._replace(stop=block.stop, cost=last.cost + block.cost)
        else:
            found.append(block)
    return found


def deal(documents: Sequence[int], rows: int, starts: Sequence[int], key_cost: float) -> Deal:
    """Cut the shares into blocks and deal these to the ranks.

    Args:
        documents: flat place at which each document starts, and b*S.
        rows: b.
        starts: column at which each rank's share of a row starts, and S.
        key_cost: pairs that take as long as expanding one key, see `key_cost`.

    Raises:
        ValueError: there are fewer tokens than ranks, and some would have nothing to do.
    """
    ranks, tokens = len(starts) - 1, rows * starts[-1]
    if tokens < ranks:
        raise ValueError(f"{tokens} tokens cannot be attended to by {ranks} ranks; give each at least one")
    costs = _Costs(documents, starts[-1])
    at_home = _at_home(costs, rows, starts)
    contiguous = tuple(sum(block.cost for block in blocks) for blocks in at_home)
    tried = [
        Deal(_matched(_dealt(_cut(costs, rows, starts, -(-tokens // (ranks * blocks))), ranks)), contiguous)
        for blocks in FINENESS
    ]
    best = min(tried, key=lambda each: _slowest(each, key_cost))
    home = Deal(at_home, contiguous)
    stays = all(at_home) and _slowest(home, key_cost) <= WORTH_MOVING * _slowest(best, key_cost)
    return home if stays else best


def key_cost(model: ModelConfig) -> float:
    """Pairs of a query and a key that take as many operations, per head, as expanding one key and value."""
    expansion = model.kv_lora_rank * (model.qk_nope_head_dim + model.v_head_dim)
    return expansion / (model.qk_nope_head_dim + model.qk_extra_head_dim + model.v_head_dim)


def heads_at_once(model: ModelConfig, key_rows: int, element: int) -> int:
    """Heads whose keys and values are expanded together: the largest divisor of H that fits `KEY_BYTES`."""
    one_head = key_rows * _head_widths(model) * element
    fitting = max(1, min(model.num_heads, KEY_BYTES // max(one_head, 1)))
    return next(heads for heads in range(fitting, 0, -1) if model.num_heads % heads == 0)


@dataclass(frozen=True)
class MLABytes:
    """Device memory that one Gated MLA layer takes on the rank with the most keys.

    Without weights, and without what the attention kernel takes inside: FlashAttention pads values as wide as
    keys.
    """

    ranks: int
    max_over_mean: float
    """Of the attention's cost over ranks."""
    contiguous: float
    """The same, if each rank computed the queries that it holds."""
    key_rows: int
    """Keys that the rank sees."""
    heads: int
    """Whose keys are expanded together."""
    gathered: int
    """Latents of all ranks: in forward, and again in backward if `mla.key` is recomputed, else kept."""
    expanded: int
    """Keys and values of those heads: all that is there at a time if `mla.key` is recomputed."""
    forward: int
    """Latents, expanded keys and values, and what expansion makes on its way."""
    backward: int
    """The same with their gradients, and the gradient of the latents in FP32."""
    kept: int
    """Keys and values of all heads from forward to backward, if `mla.key` is not recomputed."""
    queries: int
    """Queries and outputs that stay for backward, those at home and those computed for others."""


def mla_bytes(model: ModelConfig, length: int, ranks: int) -> MLABytes:
    """For one row of `length` tokens that is one document, over `ranks` even shares."""
    element = BYTES[model_dtype(model)]
    starts = tuple(length * rank // ranks for rank in range(ranks + 1))
    dealt = deal((0, length), 1, starts, key_cost(model))
    rows, tokens = max(dealt.key_rows), max(dealt.tokens)
    heads = heads_at_once(model, rows, element)
    latent = model.kv_lora_rank + model.qk_extra_head_dim
    gathered, taken = length * latent * element, rows * latent * element
    one_head = rows * _head_widths(model) * element
    product = rows * heads * (model.qk_nope_head_dim + model.v_head_dim) * element
    expanded = heads * one_head
    values = model.num_heads * model.v_head_dim
    query = model.num_heads * (model.qk_nope_head_dim + model.qk_extra_head_dim)
    return MLABytes(
        ranks,
        imbalance(dealt.costs),
        imbalance(dealt.contiguous),
        rows,
        heads,
        gathered,
        expanded,
        forward=gathered + taken + product + expanded,
        # Latents; keys, values and their gradients; gradients side by side; of the latents FP32, its rounding
        # and what was there from the heads before.
        backward=gathered + taken + 2 * expanded + product + length * latent * (4 + 2 * element) + taken,
        kept=model.num_heads * one_head,
        queries=(tokens * (model.q_lora_rank + query + values) + length // ranks * values) * element,
    )


def _head_widths(model: ModelConfig) -> int:
    """Elements of a key and a value of one head."""
    return model.qk_nope_head_dim + model.qk_extra_head_dim + model.v_head_dim


class AttentionShare(NamedTuple):
    """What a rank attends to, over the tokens that it holds: the most of any rank."""

    queries: float
    keys: float
    moves: bool
    """Whether queries travel."""


def attention_share(config: Config) -> AttentionShare:
    """Of rows that are one document each."""
    ranks = config.parallel.context
    if ranks == 1:
        return AttentionShare(1.0, 1.0, False)
    rows, length = config.data.micro_batch_size, config.data.sequence_length
    dealt = _even_deal(rows, length, ranks, key_cost(config.model))
    held = rows * length / ranks
    return AttentionShare(max(dealt.tokens) / held, max(dealt.key_rows) / held, dealt.moves)


@cache
def _even_deal(rows: int, length: int, ranks: int, key_cost: float) -> Deal:
    starts = tuple(length * rank // ranks for rank in range(ranks + 1))
    return deal(range(0, (rows + 1) * length, length), rows, starts, key_cost)


class _Costs:
    """Pairs up to any place, from the borders of documents."""

    def __init__(self, documents: Sequence[int], length: int) -> None:
        self.borders, self.length = documents, length
        self._before = [0, *accumulate(n * (n + 1) // 2 for n in (z - a for a, z in pairwise(documents)))]

    def document(self, place: int) -> int:
        """Where the document of a flat place starts."""
        return self.borders[bisect_right(self.borders, place) - 1]

    def block(self, row: int, start: int, stop: int, home: int) -> Block:
        """Of these columns."""
        first = row * self.length
        cost = self._up_to(first + stop) - self._up_to(first + start)
        return Block(row, start, stop, self.document(first + start) - first, home, cost)

    def _up_to(self, place: int) -> int:
        index = bisect_right(self.borders, place) - 1
        seen = place - self.borders[index]
        return self._before[index] + seen * (seen + 1) // 2


def _at_home(costs: _Costs, rows: int, starts: Sequence[int]) -> tuple[tuple[Block, ...], ...]:
    return tuple(
        tuple(costs.block(row, start, stop, rank) for row in range(rows) if start < stop)
        for rank, (start, stop) in enumerate(pairwise(starts))
    )


def _cut(costs: _Costs, rows: int, starts: Sequence[int], largest: int) -> list[Block]:
    """Blocks of at most `largest` tokens, as even as they can be within each share."""
    found = []
    for row in range(rows):
        for home, (start, stop) in enumerate(pairwise(starts)):
            parts = -(-(stop - start) // largest)
            borders = [start + (stop - start) * part // parts for part in range(parts)]
            found += [costs.block(row, a, z, home) for a, z in pairwise([*borders, stop])]
    return found


def _dealt(blocks: Sequence[Block], ranks: int) -> list[list[Block]]:
    """The dearest first, each to the cheapest hand of those that have less than their share of tokens."""
    share = sum(block.tokens for block in blocks) / ranks
    hands: list[list[Block]] = [[] for _ in range(ranks)]
    costs, tokens = [0] * ranks, [0] * ranks
    for block in sorted(blocks, key=lambda block: (-block.cost, block.row, block.start)):
        hand = min(
            (hand for hand in range(ranks) if tokens[hand] < share),
            key=lambda hand: (costs[hand], tokens[hand], hand),
        )
        hands[hand].append(block)
        costs[hand] += block.cost
        tokens[hand] += block.tokens
    return hands


def _matched(hands: Sequence[Sequence[Block]]) -> tuple[tuple[Block, ...], ...]:
    """Hands given to ranks so that much of them is at home already."""
    kept: dict[tuple[int, int], int] = {}
    for hand, blocks in enumerate(hands):
        for block in blocks:
            kept[hand, block.home] = kept.get((hand, block.home), 0) + block.tokens
    rank_of: dict[int, int] = {}
    for (hand, rank), _ in sorted(kept.items(), key=lambda item: (-item[1], item[0])):
        if hand not in rank_of and rank not in rank_of.values():
            rank_of[hand] = rank
    free = iter(sorted(set(range(len(hands))) - set(rank_of.values())))
    by_rank = {rank_of[hand] if hand in rank_of else next(free): blocks for hand, blocks in enumerate(hands)}
    return tuple(tuple(sorted(by_rank[rank])) for rank in range(len(hands)))


def _slowest(dealt: Deal, key_cost: float) -> float:
    """Pairs that take as long as the work of the slowest rank."""
    return max(cost + key_cost * rows for cost, rows in zip(dealt.costs, dealt.key_rows, strict=True))

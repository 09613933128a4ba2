"""Where ZeRO's shards cut the matrices of a pipeline rank, and what Per-Head Muon then sends; no torch.

Follows megatron-core's gradient buffers: one for each dtype and, with expert parallelism, for routed experts;
parameters from the last to the first, each on a multiple of 64 elements, in buckets that divide among the
ranks. The order of a chunk's parameters is that of its modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from parallel.topology import Topology

from ..config import Config, ModelConfig
from ..shapes import Parameter
from .groups import Split, split
from .owners import GATHER_BYTES, RETURN_BYTES, Block, assign, cut, spans, travelling

ALIGNMENT = 64
"""Elements."""
BUCKET_MULTIPLE = 128
LEAST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Elements of a bucket of the first chunk on the first pipeline rank; every other chunk is one bucket."""

_PARTS = (
    "attention_res", "input_norm", "mlp_res", "post_norm", "self_attention", "mlp.router", "mlp.latent_down",
    "mlp.experts", "mlp",
)  # fmt: skip

Rule = Callable[[Parameter, ModelConfig], Split | None]
Owned = tuple[list[Block], list[int]]
"""The blocks of a chunk, and the owner of each among the ranks that share it."""


def module_order(entries: Sequence[Parameter]) -> list[Parameter]:
    """A chunk's parameters as its modules list them, from the order of the forward pass."""
    ordered: list[Parameter] = []
    for layer, members in groupby(entries, key=_layer):
        ordered += sorted(members, key=lambda entry: _place(entry.name.removeprefix(layer)))
    return ordered


def _layer(entry: Parameter) -> str:
    parts = entry.name.split(".")
    return f"{parts[0]}.{parts[1]}." if parts[0] == "layers" or parts[:2] == ["mtp", "layer"] else ""


def _place(name: str) -> tuple[int, bool]:
    part = next((index for index, part in enumerate(_PARTS) if name.startswith(part)), 0)
    # A module's own parameters precede those of its linear layers.
    return part, name.startswith("self_attention") and name.endswith(".weight")


def owned_blocks(
    config: Config,
    topology: Topology,
    chunks: Sequence[Sequence[Parameter]],
    *,
    first: bool,
    expert: bool,
    rule: Rule = split,
) -> list[Owned]:
    """Blocks and owners of every chunk of a pipeline rank, as the optimizer of dense or expert ones has them.

    Args:
        chunks: `shapes.compact_parameters` of each chunk.
        first: whether it is the first pipeline rank.
        expert: of routed experts, which have ranks of their own under expert parallelism.
        rule: how each matrix is cut.
    """
    apart = topology.expert > 1
    ranks = topology.expert_data if expert and apart else topology.data * topology.context
    loads = [0.0] * ranks
    owned = []
    for index, chunk in enumerate(chunks):
        entries = [
            entry
            for entry in _local(module_order(chunk), topology)
            if entry.trainable and expert == (apart and entry.kind == "expert")
        ]
        bucket = max(LEAST_BUCKET, BUCKET_PER_RANK * topology.data) if first and not index else None
        blocks = list(_blocks(config, entries, ranks, bucket, rule))
        owned.append((blocks, assign(blocks, loads, config.optim.muon_steps)))
    return owned


def muon_traffic(
    config: Config, topology: Topology, chunks: Sequence[Sequence[Parameter]], *, first: bool
) -> dict[str, int]:
    """Bytes that the busiest rank of a stage sends for Per-Head Muon in a step; `chunks` as above."""
    sent = {"muon_gather": 0, "muon_return": 0}
    for expert in (False, True):
        gathers: dict[int, int] = {}
        returns: dict[int, int] = {}
        for blocks, owners in owned_blocks(config, topology, chunks, first=first, expert=expert):
            for _, piece, owner in travelling(blocks, owners):
                size = piece.stop - piece.start
                gathers[piece.rank] = gathers.get(piece.rank, 0) + GATHER_BYTES * size
                returns[owner] = returns.get(owner, 0) + RETURN_BYTES * size
        sent["muon_gather"] += max(gathers.values(), default=0)
        sent["muon_return"] += max(returns.values(), default=0)
    return sent


def _local(entries: Sequence[Parameter], topology: Topology) -> Iterator[Parameter]:
    """What one rank holds: its own experts, one after another."""
    for is_expert, members in groupby(entries, key=lambda entry: entry.kind == "expert"):
        held = list(members)
        copies = held[0].copies // topology.expert if is_expert else 1
        for _ in range(copies):
            yield from (replace(entry, copies=1) for entry in held)


def _blocks(
    config: Config, entries: list[Parameter], ranks: int, bucket: int | None, rule: Rule
) -> Iterator[Block]:
    number = 0
    for dtype in dict.fromkeys(entry.dtype for entry in entries):
        members = [entry for entry in entries if entry.dtype == dtype]
        for entry, offset, shard in _placed(members, ranks, bucket):
            found = rule(entry, config.model)
            if found is not None:
                parts = spans(offset, entry.numel, shard)
                yield from cut(number, found.blocks(entry.shape[1]), parts)
                number += 1


def _placed(entries: list[Parameter], ranks: int, bucket: int | None) -> Iterator[tuple[Parameter, int, int]]:
    """(parameter, its first element in its bucket, elements of a shard of that bucket), in buffer order."""
    held: list[tuple[Parameter, int]] = []
    end = 0
    for entry in reversed(entries):
        start = math.ceil(end / ALIGNMENT) * ALIGNMENT
        held.append((entry, start))
        end = start + entry.numel
        if bucket is not None and end >= bucket:
            yield from _closed(held, end, ranks)
            held, end = [], 0
    yield from _closed(held, end, ranks)


def _closed(held: list[tuple[Parameter, int]], end: int, ranks: int) -> Iterator[tuple[Parameter, int, int]]:
    multiple = math.lcm(ranks, BUCKET_MULTIPLE)
    shard = math.ceil(end / multiple) * multiple // ranks
    yield from ((entry, start, shard) for entry, start in held)

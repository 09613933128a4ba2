"""Bytes that ranks send in one optimizer step, by name, and the bandwidth they meet.

Collectives count as rings do: a reduce-scatter or an all-gather over n ranks sends (n - 1) / n of the whole
from each, an all-reduce twice that. Experts are evenly loaded. Evaluation and checkpoints are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.pipeline.rows import RowPlan
from parallel.pipeline.table import Table
from parallel.topology import Topology

from .calibration import collective
from .config import Config, ModelConfig
from .context_traffic import chunk_traffic
from .expert_plan import layer_traffic
from .gradient_plan import bursts, local_numel, replicas
from .memory import Parts, features_bytes, stage_entries, tower_parameters
from .microbatch import row_bytes, tokens_per_microbatch
from .optim.layout import muon_traffic
from .shapes import BYTES, Parameter, layer_kinds
from .vision_context import sent_bytes

GIGA = 1e9


def moe_layers(model: ModelConfig, layers: range) -> int:
    """MoE layers of a chunk; the MTP layer mirrors the last decoder layer and counts with it."""
    kinds = layer_kinds(model)
    mtp = model.mtp_layers if layers.stop == model.num_layers else 0
    return sum(kinds[layer][1] == "moe" for layer in layers) + mtp * (kinds[-1][1] == "moe")


def rank_traffic(
    config: Config, topology: Topology, cuts: list[range], table: Table, rows: RowPlan, parts: Parts = ()
) -> list[dict[str, float]]:
    """Bytes sent by name for a rank of each pipeline stage.

    Args:
        parts: the images of the table's vision operations; () where it has none.
    """
    layout, tower = rows.layout, tower_parameters(config)
    traffic = []
    for rank, chunks in enumerate(stage_entries(config, cuts, table.layout)):
        entries = [entry for chunk in chunks for entry in chunk]
        sums = [(chunk, bursts(table, rank, index)) for index, chunk in enumerate(chunks)]
        stages = [layout.stage(rank, chunk) for chunk in range(layout.virtual)]
        traffic.append(
            {
                **_pipeline(config, stages, rows),
                **_context(config, [cuts[stage] for stage in stages]),
                **_experts(config, topology, [cuts[stage] for stage in stages]),
                **_gradients(config, topology, [*sums, (tower, 1)]),
                **_muon(config, topology, [*chunks, tower] if tower else chunks, first=rank == 0),
                **(_vision(config, table, rank, tower, parts) if tower else {}),
                "balance_histograms": _histograms(config, topology, entries),
            }
        )
    return traffic


def _pipeline(config: Config, stages: list[int], rows: RowPlan) -> dict[str, float]:
    """AttnRes rows new to the next stage's rank and the running sum; their gradients the other way."""
    layout = rows.layout
    crossed = [
        stage for stage in range(1, layout.stages) if layout.home(stage)[0] != layout.home(stage - 1)[0]
    ]
    row = config.run.microbatches * row_bytes(config)
    return {
        "pipeline_forward": row * sum(rows.width(stage) for stage in crossed if stage - 1 in stages),
        "pipeline_backward": row * sum(rows.width(stage) for stage in crossed if stage in stages),
    }


def _vision(
    config: Config, table: Table, rank: int, tower: list[Parameter], parts: Parts
) -> dict[str, float]:
    """Features to the first stage, their gradients back, and the tower's gradients summed over the stages.

    That sum is FP32, and the sum over data ranks follows it.
    """
    first, ranks = table.layout.home(0)[0], table.layout.pipeline
    sent = [0.0] * ranks
    shared = dict.fromkeys(("vision_keys", "vision_features"), 0.0) if config.parallel.context > 1 else {}
    for microbatch, row in enumerate(parts):
        for part, grids in enumerate(row):
            here = table.tower_rank[microbatch, part]
            sent[here] += features_bytes(config, grids) / config.parallel.context
            if here == rank:
                for name, size in sent_bytes(config, grids).items():
                    shared[name] += size
    sent[first] = 0
    return {
        **shared,
        "vision_embeddings": sent[rank],
        "vision_embedding_gradients": sum(sent) if rank == first else 0,
        "vision_gradient_all_reduce": 2 * (ranks - 1) / ranks * 4 * sum(entry.numel for entry in tower),
    }


def _context(config: Config, chunks: list[range]) -> dict[str, float]:
    total: dict[str, float] = {}
    for chunk in chunks:
        for name, size in chunk_traffic(config, chunk).items():
            total[name] = total.get(name, 0) + config.run.microbatches * size
    return total


def _experts(config: Config, topology: Topology, chunks: list[range]) -> dict[str, float]:
    layers = sum(moe_layers(config.model, chunk) for chunk in chunks)
    passes = config.run.microbatches * layers
    sent = layer_traffic(config, topology, tokens_per_microbatch(config))
    return {name: passes * size for name, size in sent.items()}


def _gradients(
    config: Config, topology: Topology, sums: list[tuple[list[Parameter], int]]
) -> dict[str, float]:
    """FP32 gradients to the owners of their shards and parameters back, or the former to all ranks.

    Args:
        sums: parameters, and how often in a step their gradients are summed.
    """
    reduced = gathered = 0.0
    for entry, times in ((entry, times) for entries, times in sums for entry in entries):
        ranks = replicas(entry, topology)
        share = local_numel(entry, topology) * entry.trainable * (ranks - 1) / ranks
        reduced += times * 4 * share
        gathered += BYTES[entry.dtype] * share
    if config.parallel.zero:
        return {"gradient_reduce_scatter": reduced, "parameter_all_gather": gathered}
    return {"gradient_all_reduce": 2 * reduced}


def _muon(
    config: Config, topology: Topology, chunks: Sequence[Sequence[Parameter]], *, first: bool
) -> dict[str, float]:
    """Pieces of blocks that lie in several shards, to their owners and back."""
    if config.optim.name != "muon_per_head" or not config.parallel.zero:
        return {}
    return dict(muon_traffic(config, topology, chunks, first=first))


def _histograms(config: Config, topology: Topology, entries: list[Parameter]) -> float:
    """int32 histogram and two int64 loads of every router, summed over the ranks with other tokens."""
    model, ranks = config.model, topology.data * topology.context
    routers = sum(entry.kind == "router" for entry in entries)
    return 2 * (ranks - 1) / ranks * routers * model.num_experts * (4 * model.balance_bins + 2 * 8)


def ring_bandwidth(config: Config, size: int, stride: int) -> float:
    """Bytes a second of each of `size` ranks, `stride` apart, in rings that use the ports of all members."""
    link, network = _reached(config)
    within = _members_in_domain(config, size, stride)
    return link if within == size else min(link, network * within)


def collective_seconds(
    config: Config, name: str, size: int, stride: int, sent: float, *, calls: int = 1
) -> float:
    """Time of `calls` collectives of kind `name`; each of `size` ranks, `stride` apart, sends `sent` bytes.

    As measured, where `cluster.measured` has that kind.
    """
    if size == 1 or not sent:
        return 0.0
    if found := collective(config, name):
        latency, bandwidth = found
        return calls * latency + sent / bandwidth
    return calls * _latency(config, size, stride) + sent / ring_bandwidth(config, size, stride)


def exchange_seconds(config: Config, topology: Topology, sent: float, *, calls: int = 1) -> float:
    """Time in which expert-parallel ranks exchange `sent` bytes each: links and network carry their shares
    at once."""
    size = topology.expert
    if size == 1 or not sent:
        return 0.0
    if found := collective(config, "exchange"):
        latency, bandwidth = found
        return calls * latency + sent / bandwidth
    link, network = _reached(config)
    within = _members_in_domain(config, size, 1)
    peer = sent / (size - 1)
    inside = peer * (within - 1) / link
    outside = peer * (size - within) / network
    return calls * _latency(config, size, 1) + max(inside, outside)


def hop_seconds(config: Config, topology: Topology, width: int) -> float:
    """Time of one message of `width` rows between neighbouring stages."""
    if topology.pipeline == 1:
        return 0.0
    return collective_seconds(
        config, "message", 2, topology.data * topology.context, width * row_bytes(config)
    )


def link_class(config: Config, size: int, stride: int) -> str:
    """What the slowest part of a group of `size` ranks, `stride` apart, goes over: none, link or network."""
    if size == 1:
        return "none"
    return "link" if _members_in_domain(config, size, stride) == size else "network"


def link_of(config: Config, topology: Topology, name: str) -> tuple[str, str]:
    """Group in which what `rank_traffic` calls `name` travels, and its `link_class`."""
    beside = topology.data * topology.context
    if name == "vision_gradient_all_reduce":
        return "pipeline", link_class(config, topology.pipeline, beside)
    if name.startswith(("pipeline", "vision_embedding")):
        return "pipeline", link_class(config, min(2, topology.pipeline), beside)
    if name.startswith("expert"):
        return "expert", link_class(config, topology.expert, 1)
    if name.startswith(("context", "vision")):
        return "context", link_class(config, topology.context, 1)
    return "data", link_class(config, beside, 1)


def _reached(config: Config) -> tuple[float, float]:
    """Bytes a second that collectives reach over links and over the network."""
    cluster = config.cluster
    link = cluster.link_gbps * cluster.efficiency.link
    return link * GIGA, cluster.network_gbps * cluster.efficiency.network * GIGA


def _latency(config: Config, size: int, stride: int) -> float:
    cluster = config.cluster
    inside = link_class(config, size, stride) == "link"
    return 1e-6 * (cluster.link_latency_us if inside else cluster.network_latency_us)


def _members_in_domain(config: Config, size: int, stride: int) -> int:
    """Members of a group that links join."""
    cluster = config.cluster
    domain = max(cluster.ranks_per_node or cluster.gpus_per_node, cluster.link_domain or 0)
    return max(1, min(size, domain // stride))

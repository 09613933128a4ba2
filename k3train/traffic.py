"""Bytes that ranks send in one optimizer step, by name, and the bandwidth they meet.

Collectives count as rings do: a reduce-scatter or an all-gather over n ranks sends (n - 1) / n of the whole
from each, an all-reduce twice that. Experts are evenly loaded. Evaluation and checkpoints are left out.
"""

from __future__ import annotations

from parallel.topology import Topology

from .config import Config, ModelConfig
from .memory import element_bytes, local_numel, replicas, stage_of, tokens_per_microbatch
from .shapes import BYTES, Parameter, compact_parameters, layer_kinds

GIGA = 1e9


def payload_bytes(config: Config, payload_rows: int) -> int:
    """One message between neighbouring stages: AttnRes rows and the running sum of a micro-batch."""
    model = config.model
    return tokens_per_microbatch(config) * payload_rows * model.hidden_size * element_bytes(model)


def exchange_bytes(config: Config, topology: Topology) -> float:
    """What one rank sends to others when its tokens travel to their experts, or back, once in one layer."""
    model = config.model
    rows = tokens_per_microbatch(config) * model.top_k
    return rows * model.latent_size * element_bytes(model) * (topology.expert - 1) / topology.expert


def moe_layers(model: ModelConfig, layers: range) -> int:
    """MoE layers of a chunk; the MTP layer mirrors the last decoder layer and counts with it."""
    kinds = layer_kinds(model)
    mtp = model.mtp_layers if layers.stop == model.num_layers else 0
    return sum(kinds[layer][1] == "moe" for layer in layers) + mtp * (kinds[-1][1] == "moe")


def rank_traffic(
    config: Config, topology: Topology, cuts: list[range], payload_rows: int
) -> list[dict[str, float]]:
    """Bytes sent by name for a rank of each pipeline stage."""
    owned: list[list[Parameter]] = [[] for _ in range(topology.pipeline)]
    for entry in compact_parameters(config.model):
        owned[stage_of(entry, cuts) % topology.pipeline].append(entry)
    traffic = []
    for rank, entries in enumerate(owned):
        stages = range(rank, len(cuts), topology.pipeline)
        traffic.append(
            {
                **_pipeline(config, topology, stages, payload_bytes(config, payload_rows)),
                **_experts(config, topology, [cuts[stage] for stage in stages]),
                **_gradients(config, topology, entries),
                "balance_histograms": _histograms(config, topology, entries),
            }
        )
    return traffic


def _pipeline(config: Config, topology: Topology, stages: range, message: int) -> dict[str, float]:
    if topology.pipeline == 1:
        return {"pipeline_forward": 0, "pipeline_backward": 0}
    sent = config.run.microbatches * message
    return {
        "pipeline_forward": sent * (len(stages) - (topology.num_chunks - 1 in stages)),
        "pipeline_backward": sent * (len(stages) - (0 in stages)),
    }


def _experts(config: Config, topology: Topology, chunks: list[range]) -> dict[str, float]:
    """Each way runs in forward and, for the other way's gradient, in backward; recompute adds a forward."""
    passes = 2 + (config.model.recompute == "layer")
    layers = sum(moe_layers(config.model, chunk) for chunk in chunks)
    sent = config.run.microbatches * layers * passes * exchange_bytes(config, topology)
    return {"expert_dispatch": sent, "expert_combine": sent}


def _gradients(config: Config, topology: Topology, entries: list[Parameter]) -> dict[str, float]:
    """FP32 gradients to the owners of their shards and parameters back, or the former to all ranks."""
    reduced = gathered = 0.0
    for entry in entries:
        ranks = replicas(entry, topology)
        share = local_numel(entry, topology) * entry.trainable * (ranks - 1) / ranks
        reduced += 4 * share
        gathered += BYTES[entry.dtype] * share
    if config.parallel.zero == 1:
        return {"gradient_reduce_scatter": reduced, "parameter_all_gather": gathered}
    return {"gradient_all_reduce": 2 * reduced}


def _histograms(config: Config, topology: Topology, entries: list[Parameter]) -> float:
    """int32 histogram and two int64 loads of every router, summed over the ranks with other tokens."""
    model, ranks = config.model, topology.data * topology.context
    routers = sum(entry.kind == "router" for entry in entries)
    return 2 * (ranks - 1) / ranks * routers * model.num_experts * (4 * model.balance_bins + 2 * 8)


def ring_bandwidth(config: Config, size: int, stride: int) -> float:
    """Bytes a second of each of `size` ranks, `stride` apart, in rings that use the ports of all members."""
    cluster = config.cluster
    within = _members_in_node(config, size, stride)
    if within == size:
        return cluster.link_gbps * GIGA
    return min(cluster.link_gbps, cluster.network_gbps * within) * GIGA


def exchange_seconds(config: Config, topology: Topology) -> float:
    """Time of one `exchange_bytes`: links and network carry their shares at the same time."""
    size = topology.expert
    if size == 1:
        return 0.0
    within = _members_in_node(config, size, 1)
    peer = exchange_bytes(config, topology) / (size - 1)
    inside = peer * (within - 1) / config.cluster.link_gbps
    outside = peer * (size - within) / config.cluster.network_gbps
    return max(inside, outside) / GIGA


def hop_seconds(config: Config, topology: Topology, payload_rows: int) -> float:
    """Time of one message between neighbouring stages."""
    if topology.pipeline == 1:
        return 0.0
    return payload_bytes(config, payload_rows) / ring_bandwidth(config, 2, topology.data * topology.context)


def _members_in_node(config: Config, size: int, stride: int) -> int:
    node = config.cluster.ranks_per_node or config.cluster.gpus_per_node
    return max(1, min(size, node // stride))

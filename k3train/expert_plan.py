"""What an expert-parallel layer moves and holds under each dispatcher, from the configuration alone.

No torch. Letters: R ranks that share the experts, E routed experts, P = E/R at home on a rank, K experts of a
token, l latent width, f expert width.
"""

from __future__ import annotations

from parallel.topology import Topology

from .activation_policy import LAYER, recomputes
from .config import Config, ModelConfig
from .quant_plan import travel_share
from .shapes import BYTES, model_dtype

REPLICAS = 1
"""Experts that a rank borrows for a layer, in the plan: what dealt experts need under usual loads."""

PEER_STAGING = 256 << 20
"""Two lanes, for rows and experts, of `parallel.moonep.transport.peer`."""


def balanced(config: Config) -> bool:
    """MoonEP dispatches."""
    return bool(config.model.num_experts) and config.parallel.expert.dispatcher == "moonep"


def expert_bytes(model: ModelConfig) -> int:
    """One routed expert's weights."""
    return 3 * model.latent_size * model.expert_ffn_size * BYTES[model_dtype(model)]


def payload_rows(model: ModelConfig, ranks: int) -> float:
    """Other ranks that a token's experts live on, evenly chosen: rows it sends when each rank gets one."""
    places, missed = model.num_experts // ranks, 1.0
    for drawn in range(model.top_k):
        missed *= max(0, model.num_experts - places - drawn) / (model.num_experts - drawn)
    return (ranks - 1) * (1 - missed)


def entry_rows(model: ModelConfig, ranks: int) -> float:
    """Rows that a token sends to other ranks when each of its experts gets one."""
    return model.top_k * (ranks - 1) / ranks


def dispatch_row_bytes(config: Config, topology: Topology) -> float:
    """What a token sends to other ranks on its way to its experts, in one layer."""
    model, ranks = config.model, topology.expert
    rows = payload_rows(model, ranks) if balanced(config) else entry_rows(model, ranks)
    return rows * model.latent_size * BYTES[model_dtype(model)]


def combine_row_bytes(config: Config, topology: Topology) -> float:
    """What comes back for it from other ranks: under MoonEP an FP32 sum of each, if that is less."""
    model, ranks = config.model, topology.expert
    entries = entry_rows(model, ranks) * model.latent_size * BYTES[model_dtype(model)]
    return min(entries, payload_rows(model, ranks) * model.latent_size * 4) if balanced(config) else entries


def layer_traffic(config: Config, topology: Topology, tokens: int) -> dict[str, float]:
    """Bytes that a rank sends for one MoE layer and micro-batch, forward and backward, by name.

    Recompute runs the forward again.
    """
    forward, backward = pass_traffic(config, topology, tokens)
    forwards = 1 + recomputes(config, LAYER)
    return {name: forwards * forward.get(name, 0) + size for name, size in backward.items()}


def pass_traffic(
    config: Config, topology: Topology, tokens: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a rank sends for one MoE layer and micro-batch, by name: in forward, and in backward alone.

    Under MoonEP backward sends the tokens again beside their gradients, and the router's weights travel.
    """
    there, back = dispatch_row_bytes(config, topology), combine_row_bytes(config, topology)
    if not balanced(config):
        once: dict[str, float] = {"expert_dispatch": tokens * there, "expert_combine": tokens * back}
        return once, once
    scalars = 4 * entry_rows(config.model, topology.expert)
    borrowed = usually_borrowed(config, topology) * expert_bytes(config.model)
    fetched = borrowed * travel_share(config)
    forward = {
        "expert_dispatch": tokens * (there + scalars),
        "expert_combine": tokens * back,
        "expert_weights": fetched,
    }
    backward = {
        "expert_dispatch": tokens * 2 * there,
        "expert_combine": tokens * (there + scalars),
        "expert_weights": fetched,
        "expert_weight_gradients": borrowed,
    }
    return forward, backward


def most_borrowed(config: Config, topology: Topology) -> int:
    """Experts that a rank borrows for a layer at most, by its policy."""
    experts = config.parallel.expert
    if topology.expert == 1 or experts.policy == "none":
        return 0
    places = config.model.num_experts // topology.expert
    return min(experts.eplb_copies, places) if experts.policy == "eplb" else places


def usually_borrowed(config: Config, topology: Topology) -> int:
    """Experts that a rank borrows for a layer, in the plan."""
    most = most_borrowed(config, topology)
    return most if config.parallel.expert.policy == "eplb" else min(REPLICAS, most)


def assumptions(config: Config, topology: Topology) -> list[str]:
    """What the plan takes for granted of borrowed experts."""
    most = most_borrowed(config, topology)
    if not balanced(config) or not most:
        return []
    usual = usually_borrowed(config, topology)
    more = f", and up to {most} with more skew" if most > usual else ""
    return [f"a rank borrows the weights of {usual} expert{'s' * (usual > 1)} in each layer{more}"]


def slot_bytes(config: Config, topology: Topology) -> int:
    """The most that borrowed experts and their gradients take on a rank, in one layer at a time."""
    if not balanced(config):
        return 0
    most, slots = most_borrowed(config, topology), config.parallel.expert.slots
    return 2 * (most if slots is None else min(most, slots)) * expert_bytes(config.model)


def staging_bytes(config: Config, topology: Topology) -> int:
    """Buffers of the peer-memory transport on a rank, where the expert-parallel ranks share a host."""
    cluster, experts = config.cluster, config.parallel.expert
    within = topology.expert <= (cluster.ranks_per_node or cluster.gpus_per_node)
    possible = balanced(config) and topology.expert > 1 and within and cluster.gpu != "cpu"
    return PEER_STAGING if possible and experts.transport != "collective" else 0


def working_bytes(config: Config) -> int:
    """What a layer's backward under MoonEP holds of one token at once: rows of input, output gradient and
    their gradient, and activations."""
    if not balanced(config):
        return 0
    model = config.model
    return model.top_k * (3 * model.latent_size + 4 * model.expert_ffn_size) * BYTES[model_dtype(model)]

"""What it costs to run a region of the model again, for one token or patch. Needs no torch.

FLOPs are those of matrix products and cores, as in `flops`. Bytes are those moved through device memory: what
the region takes is read, what it makes is written, and what it makes for itself is read again; weights, which
all tokens share, are left out. So are transfers between ranks, which running a whole layer again repeats.
Letters as in `shapes`.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import activation_bytes
from .activation_sites import Cost, Saved
from .config import Config, ModelConfig
from .flops import KDA_CHUNK, layer_flops, output_flops, site_sources
from .loss_plan import FLOAT, IN_CHUNKS, chosen
from .shapes import BYTES, block_starts, layer_kinds, model_dtype, vocab_rows
from .vision_config import VisionConfig
from .vision_shapes import Grid, attention_channels, forward_flops, patches


def layer_costs(config: Config, layer: int, device: str) -> dict[str, Cost]:
    """Of the regions of decoder layer `layer` (0-based), and of all of it as `layer`."""
    model = config.model
    tensors = activation_bytes.decoder_layer(config, layer, device)
    attention, mlp = layer_kinds(model)[layer]
    sources = site_sources(model, layer)
    flops = _attention(config, attention) | _feed_forward(model, mlp)
    flops["attn_res.mix"] = 6.0 * model.hidden_size * sum(sources)
    costs = _costs(tensors, flops)
    # Of the sources the list has only the last.
    costs["attn_res.mix"] += Cost(0.0, _row(model) * (sum(sources) - 2 + (not sources[0])))
    whole = sum(layer_flops(model, layer, config.data.sequence_length).values())
    costs["layer"] = Cost(whole, _whole(costs, model))
    return costs


def output_costs(config: Config, device: str) -> dict[str, Cost]:
    """Of the last mixture and the head."""
    model = config.model
    d, sources = model.hidden_size, block_starts(model, model.num_layers) + 1
    flops = {"attn_res.mix": 6.0 * d * sources, "head": 2.0 * d * vocab_rows(model)}
    costs = _costs(activation_bytes.output(config, device), flops)
    costs["attn_res.mix"] += Cost(0.0, _row(model) * (sources - 1))
    costs["head"] += _logits(config)
    return costs


def mtp_costs(config: Config, device: str) -> dict[str, Cost]:
    """Of the regions of the MTP layer, its pass through the head among them; nothing without one."""
    model = config.model
    if not model.mtp_layers:
        return {}
    attention, mlp = layer_kinds(model)[-1]
    head = 2.0 * model.hidden_size * vocab_rows(model)
    flops = _attention(config, attention) | _feed_forward(model, mlp) | {"head": head}
    tensors = activation_bytes.mtp(config, device)
    costs = _costs(tensors, {f"mtp.{region}": each for region, each in flops.items()})
    costs["mtp.head"] += _logits(config)
    fusion = 4.0 * model.hidden_size**2
    whole = output_flops(model, config.data.sequence_length)["mtp"] - head - fusion
    inner = {region: cost for region, cost in costs.items() if region not in ("mtp.head", "mtp.input")}
    costs["mtp.layer"] = Cost(whole, _whole(inner, model))
    return costs


def tower_costs(vision: VisionConfig, dtype: str, grid: Grid, device: str) -> dict[str, Cost]:
    """Of the regions of one block of the tower, for a patch of an item, and of all of it as `vit.layer`."""
    d, channels, length = vision.hidden_size, attention_channels(vision), patches(grid)
    flops = {
        "vit.qkv": 6.0 * d * channels,
        "vit.core": 4.0 * length * channels,
        "vit.ffn": 2.0 * d * vision.ffn_size,
    }
    costs = _costs(activation_bytes.tower_block(vision, dtype, device), flops)
    spent = forward_flops(vision, 0, grid)
    whole = (spent["vision_projection"] + spent["vision_core"]) / (vision.depth * length)
    moved = sum(cost.bytes for cost in costs.values()) + 4 * d * BYTES[dtype]
    return {**costs, "vit.layer": Cost(whole, moved)}


def _costs(tensors: Iterable[Saved], flops: dict[str, float]) -> dict[str, Cost]:
    moved: dict[str, float] = dict.fromkeys(flops, 0.0)
    for tensor in tensors:
        for region in tensor.taken_by:
            moved[region] = moved.get(region, 0.0) + tensor.bytes
        if tensor.made_in is not None:
            times = 2 if tensor.made_in in tensor.saved_by else 1
            moved[tensor.made_in] = moved.get(tensor.made_in, 0.0) + times * tensor.bytes
    return {region: Cost(flops.get(region, 0.0), size) for region, size in moved.items()}


def _logits(config: Config) -> Cost:
    """Of logits in chunks, which are written and read but not among what is saved."""
    return Cost(0.0, 2.0 * FLOAT * vocab_rows(config.model) if chosen(config) in IN_CHUNKS else 0.0)


def _row(model: ModelConfig) -> int:
    return model.hidden_size * BYTES[model_dtype(model)]


def _whole(costs: dict[str, Cost], model: ModelConfig) -> float:
    """Bytes that all regions of a layer move, and the two sums behind its sublayers."""
    return sum(cost.bytes for cost in costs.values()) + 6 * _row(model)


def _attention(config: Config, kind: str) -> dict[str, float]:
    model = config.model
    d, heads = model.hidden_size, model.num_heads
    if kind == "kda":
        head = model.kda_head_dim
        channels = heads * head
        return {
            "kda.input": 6.0 * d * channels,
            "kda.qkv": 6.0 * model.short_conv_kernel_size * channels,
            "kda.decay": 2.0 * (d * head + head * channels + d * heads),
            "kda.core": float(heads * (6 * head**2 + 3 * KDA_CHUNK * head + KDA_CHUNK**2)),
            "kda.gate_input": 2.0 * d * channels,
        }
    values, query = heads * model.v_head_dim, model.qk_nope_head_dim + model.qk_extra_head_dim
    return {
        "mla.input": 2.0 * d * (model.q_lora_rank + model.kv_lora_rank + model.qk_extra_head_dim),
        "mla.query": 2.0 * model.q_lora_rank * heads * query,
        "mla.key": 2.0 * model.kv_lora_rank * (heads * model.qk_nope_head_dim + values),
        "mla.core": float(config.data.sequence_length * (heads * query + values)),
        "mla.gate_input": 2.0 * d * values,
    }


def _feed_forward(model: ModelConfig, kind: str) -> dict[str, float]:
    d, latent, width = model.hidden_size, model.latent_size, model.expert_ffn_size
    if kind == "dense":
        return {"ffn.input": 4.0 * d * model.dense_ffn_size}
    return {
        "moe.router": 2.0 * d * model.num_experts,
        "moe.input": 2.0 * d * latent,
        "moe.dispatch_input": 4.0 * model.top_k * latent * width,
        "moe.shared.input": 4.0 * d * model.num_shared_experts * width,
    }

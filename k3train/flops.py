"""Model FLOPs of one token, by what they are spent on.

Conventions: a multiply and an add are two. Matrix products, the cores of both attentions and AttnRes count;
norms, activations, softmaxes and the optimizer do not. Attention is causal over one document as long as the
sequence, so a token meets half of it. Backward is twice forward, and a recomputed forward is not counted.
The head counts, and counts again under `mtp`. KDA's core is the chunk form with chunks of 64 tokens:
6 D^2 + 3 * 64 * D + 64^2 for each head and token, as flash-linear-attention states it, and the short
convolutions. Letters as in `shapes`.
"""

from __future__ import annotations

from collections import Counter

from .config import ModelConfig
from .shapes import block_starts, layer_kinds, vocab_rows

KDA_CHUNK = 64
BACKWARD_OVER_FORWARD = 2

TERA = 1e12


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> dict[str, float]:
    """FLOPs of the forward pass for one token, by site."""
    counts: Counter[str] = Counter()
    for layer in range(model.num_layers):
        counts.update(layer_flops(model, layer, sequence_length))
    counts.update(output_flops(model, sequence_length))
    return dict(counts)


def train_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: the numerator of MFU."""
    return (1 + BACKWARD_OVER_FORWARD) * sum(forward_flops_per_token(model, sequence_length).values())


def layer_flops(model: ModelConfig, layer: int, sequence_length: int) -> dict[str, float]:
    """Forward FLOPs of decoder layer `layer` (0-based) for one token."""
    return {
        **sublayer_flops(model, layer_kinds(model)[layer], sequence_length),
        "attn_res": 6.0 * model.hidden_size * sum(site_sources(model, layer)),
    }


def output_flops(model: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Forward FLOPs after the last decoder layer for one token: output site, head, MTP."""
    d = model.hidden_size
    head = 2.0 * d * vocab_rows(model)
    sources = block_starts(model, model.num_layers) + 1
    counts = {"attn_res": 6.0 * d * sources, "head": head}
    if model.mtp_layers:
        layer = sublayer_flops(model, layer_kinds(model)[-1], sequence_length)
        counts["mtp"] = 2.0 * d * 2 * d + sum(layer.values()) + head
    return counts


def site_sources(model: ModelConfig, layer: int) -> tuple[int, int]:
    """Sources that the attention and the MLP site of a layer mix; each costs square, logit and share."""
    before, after = block_starts(model, layer), block_starts(model, layer + 1)
    return (before + 1 if before else 0), after + 1


def sublayer_flops(model: ModelConfig, kind: tuple[str, str], sequence_length: int) -> dict[str, float]:
    """Forward FLOPs of an attention and a feed-forward sublayer for one token, by site."""
    attention, mlp = kind
    spent = _kda(model) if attention == "kda" else _mla(model, sequence_length)
    if mlp == "moe":
        return spent | _moe(model)
    return {**spent, "dense": _gated(model.hidden_size, model.dense_ffn_size)}


def _gated(width: int, inner: int) -> float:
    return 2.0 * 3 * width * inner


def _kda(model: ModelConfig) -> dict[str, float]:
    d, heads, head = model.hidden_size, model.num_heads, model.kda_head_dim
    channels = heads * head
    weights = 5 * d * channels + d * heads + d * head + head * channels
    core = heads * (6 * head**2 + 3 * KDA_CHUNK * head + KDA_CHUNK**2)
    convolutions = 2 * model.short_conv_kernel_size * 3 * channels
    return {"kda_projection": 2.0 * weights, "kda_core": float(core + convolutions)}


def _mla(model: ModelConfig, sequence_length: int) -> dict[str, float]:
    d, heads, values = model.hidden_size, model.num_heads, model.num_heads * model.v_head_dim
    query = model.qk_nope_head_dim + model.qk_extra_head_dim
    weights = (
        model.q_lora_rank * (d + heads * query)
        + d * (model.kv_lora_rank + model.qk_extra_head_dim)
        + model.kv_lora_rank * (heads * model.qk_nope_head_dim + values)
        + 2 * d * values
    )
    keys = sequence_length / 2
    return {"mla_projection": 2.0 * weights, "mla_core": 2.0 * keys * heads * (query + model.v_head_dim)}


def _moe(model: ModelConfig) -> dict[str, float]:
    d, latent, width = model.hidden_size, model.latent_size, model.expert_ffn_size
    return {
        "router": 2.0 * d * model.num_experts,
        "latent": 2.0 * 2 * d * latent,
        "experts": model.top_k * _gated(latent, width),
        "shared": _gated(d, model.num_shared_experts * width),
    }

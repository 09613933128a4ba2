"""Bytes that a rank sends to the others of its context group, for one micro-batch. Needs no torch.

Collectives count as in `traffic`; rows are one document each, the longest that they can hold.
Letters: N ranks of a group, b rows, s columns of a rank.
"""

from __future__ import annotations

from .activation_policy import LAYER, recomputes
from .config import Config
from .context_plan import deal, key_cost
from .microbatch import element_bytes
from .shapes import layer_kinds

NAMES = ("context_states", "context_halos", "context_latents", "context_queries")
"""Of everything that travels."""

STATE_BYTES = 4
"""Of an element of the maps that KDA exchanges: FP32, whatever the model's dtype."""


def state_bytes(config: Config) -> int:
    """What each rank gives to the exchange of a KDA layer, forward or backward, whatever the length."""
    model, head = config.model, config.model.kda_head_dim
    return config.data.micro_batch_size * model.num_heads * head * 2 * head * STATE_BYTES


def layer_traffic(config: Config, kind: str) -> dict[str, float]:
    """Forward and backward of one attention layer, `kind` kda or mla, by name.

    Recompute of whole layers runs the forward again.
    """
    ranks = config.parallel.context
    passes = 2 + recomputes(config, LAYER)
    sent = _kda(config, ranks) if kind == "kda" else _mla(config, ranks)
    return {name: passes * size for name, size in sent.items()}


def chunk_traffic(config: Config, layers: range) -> dict[str, float]:
    """Of the decoder layers of a chunk, and of the MTP layer behind the last one."""
    kinds = [layer_kinds(config.model)[layer][0] for layer in layers]
    if config.model.mtp_layers and layers.stop == config.model.num_layers:
        kinds.append(layer_kinds(config.model)[-1][0])
    if config.parallel.context == 1:
        return {}
    total = dict.fromkeys(NAMES, 0.0)
    for kind in kinds:
        for name, size in layer_traffic(config, kind).items():
            total[name] += size
    return total


def _kda(config: Config, ranks: int) -> dict[str, float]:
    """One pass: maps of the state, and the columns before a share that the short convolution reads."""
    model = config.model
    columns = (model.short_conv_kernel_size - 1) * 3 * model.num_heads * model.kda_head_dim
    halo = config.data.micro_batch_size * columns * element_bytes(model)
    return {"context_states": (ranks - 1) * state_bytes(config), "context_halos": (ranks - 1) * halo}


def _mla(config: Config, ranks: int) -> dict[str, float]:
    """One pass: latents of keys to all ranks, those of queries to where they are attended, results back."""
    model, rows, length = config.model, config.data.micro_batch_size, config.data.sequence_length
    element = element_bytes(model)
    latents = rows * (length // ranks) * (model.kv_lora_rank + model.qk_extra_head_dim) * element
    borders = range(0, (rows + 1) * length, length)
    starts = range(0, length + 1, length // ranks)
    dealt = deal(borders, rows, starts, key_cost(model))
    width = model.q_lora_rank + model.num_heads * model.v_head_dim
    return {
        "context_latents": (ranks - 1) * latents,
        "context_queries": dealt.moved_tokens / ranks * width * element,
    }

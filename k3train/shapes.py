"""Every parameter of the model by name, without building it.

Names are those of `model.naming.named_parameters`, shapes [out, in] as torch keeps them. Letters: d hidden,
H heads, D head width, C = H * D channels, N, X, V widths of MLA's nope, extra and value channels, E experts,
l latent, f FFN width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .config import ModelConfig
from .errors import UserError

EXPERT = "{expert}"
BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Parameter:
    """One tensor, or `copies` equal ones: those of all routed experts, with `{expert}` in the name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """fp32 or bf16."""
    kind: str
    layer: int | None = None
    """0-based decoder layer; None outside of them."""
    copies: int = 1
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Elements of all copies."""
        return math.prod(self.shape) * self.copies

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return self.numel * BYTES[self.dtype]

    @property
    def in_mtp(self) -> bool:
        """Whether it belongs to the MTP layer, which the model's published sizes leave out."""
        return self.name.startswith("mtp.")


def layer_kinds(model: ModelConfig) -> list[tuple[str, str]]:
    """("kda" | "mla", "dense" | "moe") of every decoder layer."""
    last = model.num_layers
    dense = model.num_dense_layers if model.num_experts else last
    return [
        (
            "mla" if number % model.full_attention_every == 0 or number == last else "kda",
            "dense" if number <= dense else "moe",
        )
        for number in range(1, last + 1)
    ]


def block_starts(model: ModelConfig, layer: int) -> int:
    """AttnRes blocks that have started before decoder layer `layer` (0-based): the rows of the bank."""
    return math.ceil(layer / model.attn_res_block_size)


def model_dtype(model: ModelConfig) -> str:
    """fp32 or bf16: dtype of most parameters."""
    return {"float32": "fp32", "bfloat16": "bf16"}[model.dtype]


def vocab_rows(model: ModelConfig, tokenizer_vocab: int | None = None) -> int:
    """Rows of the embedding and of the head.

    Raises UserError where neither `model.vocab_size` nor the tokenizer says how many.
    """
    if model.vocab_size is not None:
        return model.vocab_size
    if tokenizer_vocab is None:
        raise UserError("model.vocab_size=null: no tokenizer to derive it from; set model.vocab_size")
    return math.ceil(tokenizer_vocab / model.vocab_multiple) * model.vocab_multiple


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the model, MTP included, in the order of the forward pass."""
    for entry in compact_parameters(model):
        if EXPERT not in entry.name:
            yield entry
            continue
        for expert in range(entry.copies):
            yield replace(entry, name=entry.name.replace(EXPERT, str(expert)), copies=1)


def compact_parameters(model: ModelConfig) -> Iterator[Parameter]:
    """`parameters` with one entry for the same tensor of all routed experts of a layer."""
    shapes = _Shapes(model)
    vocabulary = (vocab_rows(model), model.hidden_size)
    yield shapes.weight("embedding.weight", "embedding", *vocabulary)
    kinds = layer_kinds(model)
    for layer, kind in enumerate(kinds):
        yield from shapes.decoder_layer(layer, kind)
    yield from shapes.attn_res("output_res")
    yield shapes.weight("final_norm.weight", "norm", model.hidden_size)
    yield shapes.weight("head.weight", "head", *vocabulary)
    if model.mtp_layers:
        yield from shapes.mtp(kinds[-1])


def buffers(model: ModelConfig) -> Iterator[Parameter]:
    """Saved tensors that are not parameters: the balance bias of every router."""
    prefixes = [(f"layers.{i}", i) for i, (_, mlp) in enumerate(layer_kinds(model)) if mlp == "moe"]
    named: list[tuple[str, int | None]] = [*prefixes]
    if model.mtp_layers and layer_kinds(model)[-1][1] == "moe":
        named.append(("mtp.layer", None))
    for prefix, layer in named:
        name = f"{prefix}.mlp.router.expert_bias"
        yield Parameter(name, (model.num_experts,), "fp32", "router", layer, trainable=False)


def total(model: ModelConfig) -> int:
    """Parameters without MTP, the published convention."""
    return sum(entry.numel for entry in compact_parameters(model) if not entry.in_mtp)


def active(model: ModelConfig) -> int:
    """Parameters that one token meets: `top_k` experts and the head, but no input embedding and no MTP."""
    return sum(
        entry.numel // entry.copies * (model.top_k if entry.kind == "expert" else 1)
        for entry in compact_parameters(model)
        if not entry.in_mtp and entry.kind != "embedding"
    )


def count_by_kind(model: ModelConfig) -> dict[str, int]:
    """Parameters by kind, all of the MTP layer under `mtp`."""
    counts: dict[str, int] = {}
    for entry in compact_parameters(model):
        kind = "mtp" if entry.in_mtp else entry.kind
        counts[kind] = counts.get(kind, 0) + entry.numel
    return counts


class _Shapes:
    """The modules of `k3train.model`, as lists of parameters."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.dtype = model_dtype(model)

    def weight(self, name: str, kind: str, *shape: int, layer: int | None = None) -> Parameter:
        return Parameter(name, shape, self.dtype, kind, layer)

    def decoder_layer(self, layer: int, kind: tuple[str, str]) -> Iterator[Parameter]:
        prefix = f"layers.{layer}"
        for entry in self.attn_res(f"{prefix}.attention_res", layer):
            # The first layer's attention reads the embedding alone: there is nothing to mix.
            yield replace(entry, trainable=layer > 0)
        yield from self.attn_res(f"{prefix}.mlp_res", layer)
        yield from self.sublayers(prefix, kind, layer)

    def attn_res(self, site: str, layer: int | None = None) -> Iterator[Parameter]:
        for name in ("query", "norm_weight"):
            yield self.weight(f"{site}.{name}", "attn_res", self.model.hidden_size, layer=layer)

    def sublayers(self, prefix: str, kind: tuple[str, str], layer: int | None) -> Iterator[Parameter]:
        attention, mlp = kind
        for norm in ("input_norm", "post_norm"):
            yield self.weight(f"{prefix}.{norm}.weight", "norm", self.model.hidden_size, layer=layer)
        yield from (self.kda if attention == "kda" else self.mla)(f"{prefix}.self_attention", layer)
        if mlp == "moe":
            yield from self.moe(f"{prefix}.mlp", layer)
        else:
            yield from self.ffn(f"{prefix}.mlp", "dense_ffn", self.model.dense_ffn_size, layer)

    def kda(self, prefix: str, layer: int | None) -> Iterator[Parameter]:
        d, head = self.model.hidden_size, self.model.kda_head_dim
        channels = self.model.num_heads * head
        projections = {
            "q_proj": (channels, d),
            "k_proj": (channels, d),
            "v_proj": (channels, d),
            "b_proj": (self.model.num_heads, d),
            "f_a_proj": (head, d),
            "f_b_proj": (channels, head),
            "g_proj": (channels, d),
            "o_proj": (d, channels),
        }
        for name, shape in projections.items():
            yield self.weight(f"{prefix}.{name}.weight", "kda", *shape, layer=layer)
        filters = (channels, 1, self.model.short_conv_kernel_size)
        statistics = {
            **dict.fromkeys(("q_conv", "k_conv", "v_conv"), filters),
            "A_log": (self.model.num_heads,),
            "dt_bias": (channels,),
            "o_norm.weight": (head,),
        }
        for name, fp32_shape in statistics.items():
            yield Parameter(f"{prefix}.{name}", fp32_shape, "fp32", "kda", layer)

    def mla(self, prefix: str, layer: int | None) -> Iterator[Parameter]:
        model, d, heads = self.model, self.model.hidden_size, self.model.num_heads
        values = heads * model.v_head_dim
        shapes = {
            "q_a_proj": (model.q_lora_rank, d),
            "q_a_norm": (model.q_lora_rank,),
            "q_b_proj": (heads * (model.qk_nope_head_dim + model.qk_extra_head_dim), model.q_lora_rank),
            "kv_a_proj": (model.kv_lora_rank + model.qk_extra_head_dim, d),
            "kv_a_norm": (model.kv_lora_rank,),
            "kv_b_proj": (heads * model.qk_nope_head_dim + values, model.kv_lora_rank),
            "g_proj": (values, d),
            "o_proj": (d, values),
        }
        for name, shape in shapes.items():
            yield self.weight(f"{prefix}.{name}.weight", "mla", *shape, layer=layer)

    def ffn(self, prefix: str, kind: str, width: int, layer: int | None) -> Iterator[Parameter]:
        d = self.model.hidden_size
        yield self.weight(f"{prefix}.linear_fc1.weight", kind, 2 * width, d, layer=layer)
        yield self.weight(f"{prefix}.linear_fc2.weight", kind, d, width, layer=layer)

    def moe(self, prefix: str, layer: int | None) -> Iterator[Parameter]:
        model = self.model
        d, latent, width = model.hidden_size, model.latent_size, model.expert_ffn_size
        yield self.weight(f"{prefix}.router.weight", "router", model.num_experts, d, layer=layer)
        yield self.weight(f"{prefix}.latent_down.weight", "latent", latent, d, layer=layer)
        yield self.weight(f"{prefix}.latent_norm.weight", "latent", latent, layer=layer)
        yield self.weight(f"{prefix}.latent_up.weight", "latent", d, latent, layer=layer)
        shared = model.num_shared_experts * width
        yield from self.ffn(f"{prefix}.shared_experts", "shared_expert", shared, layer)
        for linear, shape in {"linear_fc1": (2 * width, latent), "linear_fc2": (latent, width)}.items():
            name = f"{prefix}.experts.{EXPERT}.{linear}.weight"
            yield Parameter(name, shape, self.dtype, "expert", layer, copies=model.num_experts)

    def mtp(self, kind: tuple[str, str]) -> Iterator[Parameter]:
        d = self.model.hidden_size
        yield self.weight("mtp.embedding_norm.weight", "mtp", d)
        yield self.weight("mtp.hidden_norm.weight", "mtp", d)
        yield self.weight("mtp.proj.weight", "mtp", d, 2 * d)
        yield from self.sublayers("mtp.layer", kind, None)
        yield self.weight("mtp.final_norm.weight", "mtp", d)

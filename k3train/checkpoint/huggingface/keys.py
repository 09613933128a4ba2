"""Every tensor of the released layout, and the part of our parameters that it holds; needs no torch.

Our names are those of `shapes` and `vision_shapes`. A `Piece` is the smallest unit of an exchange: some rows
of one of our tensors and the one tensor, or the two when packed, that hold them in a Hugging Face folder.
Shapes are [out, in].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ... import shapes, vision_shapes
from ...config import ModelConfig
from ...errors import UserError
from ...vision_config import VisionConfig

TEXT, TOWER, PROJECTOR = "language_model.", "vision_tower.", "mm_projector."
MTP = "mtp."
"""Prefix of the multi-token-prediction layer. The released layout has no such layer, so this name is ours."""
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
BLOCK = 32
"""Neighbouring columns that share a scale in MXFP4."""
HEAD_PADDING = 128
"""A_log is stored with zeros up to a multiple of this: K3 has 96 heads and 32 zeros."""


class Stored(NamedTuple):
    """One tensor of a safetensors file."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """F32, BF16 or U8, as safetensors writes it."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Piece(NamedTuple):
    """Rows `first` to `first + shape[0]` of our tensor `name`, and where the other side keeps them."""

    name: str
    first: int
    shape: tuple[int, ...]
    """Shape of these rows on our side."""
    form: str
    """plain (the same numbers, possibly reshaped), padded (zeros behind them) or mxfp4."""
    stored: tuple[Stored, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes on the Hugging Face side."""
        return sum(tensor.nbytes for tensor in self.stored)


@dataclass(frozen=True)
class Layout:
    """Which of the possible forms a Hugging Face folder has."""

    dtype: str = "BF16"
    """Of all that the release does not keep in F32: BF16 as released, or F32."""
    packed: bool = False
    """Routed experts as MXFP4."""
    mtp: bool = False
    """With the multi-token-prediction layer, under `MTP`."""


_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "final_norm.weight": "model.norm.weight",
    "output_res.query": "model.output_attn_res_proj.weight",
    "output_res.norm_weight": "model.output_attn_res_norm.weight",
}
_LAYER = {
    "input_norm.weight": "input_layernorm.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    "attention_res.query": "self_attention_res_proj.weight",
    "attention_res.norm_weight": "self_attention_res_norm.weight",
    "mlp_res.query": "mlp_res_proj.weight",
    "mlp_res.norm_weight": "mlp_res_norm.weight",
    "self_attention.q_conv": "self_attn.q_conv1d.weight",
    "self_attention.k_conv": "self_attn.k_conv1d.weight",
    "self_attention.v_conv": "self_attn.v_conv1d.weight",
    "self_attention.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_a_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.router.expert_bias": "block_sparse_moe.gate.e_score_correction_bias",
    "mlp.latent_down.weight": "block_sparse_moe.routed_expert_down_proj.weight",
    "mlp.latent_up.weight": "block_sparse_moe.routed_expert_up_proj.weight",
    "mlp.latent_norm.weight": "block_sparse_moe.routed_expert_norm.weight",
    "mlp.shared_experts.linear_fc2.weight": "block_sparse_moe.shared_experts.down_proj.weight",
}
_FUSED = {
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared_experts.linear_fc1.weight": (
        "block_sparse_moe.shared_experts.gate_proj.weight",
        "block_sparse_moe.shared_experts.up_proj.weight",
    ),
}
_EXPERT = re.compile(r"^mlp\.experts\.(?P<number>\d+|\{expert\})\.(?P<linear>linear_fc[12])\.weight$")
_EXPERT_PARTS = {"linear_fc1": ("w1", "w3"), "linear_fc2": ("w2",)}
_PLACE = re.compile(r"^(?P<place>layers\.\d+|mtp\.layer)\.(?P<rest>.*)$")


def pieces(model: ModelConfig, vision: VisionConfig | None, layout: Layout) -> Iterator[Piece]:
    """All of a model in the order of the forward pass, the tower last.

    Raises:
        UserError: the routed experts cannot be packed.
    """
    if layout.packed:
        check_packable(model)
    dtype = next(name for name, stored in DTYPES.items() if stored == layout.dtype)
    model = replace(model, dtype=dtype, mtp_layers=int(layout.mtp))
    biases = {bias.name: bias for bias in shapes.buffers(model)}
    for parameter in shapes.compact_parameters(model):
        yield from _pieces(parameter, layout)
        if bias := biases.get(parameter.name.removesuffix("weight") + "expert_bias"):
            yield from _pieces(bias, layout)
    if vision is not None:
        kind = {"F32": "fp32", "BF16": "bf16"}[layout.dtype]
        for parameter in vision_shapes.parameters(vision, model.hidden_size, kind):
            yield _vision_piece(parameter, vision, layout)


def check_packable(model: ModelConfig) -> None:
    """Refuse widths that blocks of 32 columns do not fill; raises UserError."""
    for key in ("latent_size", "expert_ffn_size"):
        if model.num_experts and (width := getattr(model, key)) % BLOCK:
            raise UserError(
                f"model.{key}={width}: MXFP4 packs {BLOCK} columns under one scale, and it is no multiple; "
                "export without --packed"
            )


def official_keys(name: str) -> tuple[str, ...]:
    """Hugging Face keys of one of our tensors of the language model: two where gate and up are apart."""
    if name in _OUTER:
        return (TEXT + _OUTER[name],)
    match = _PLACE.match(name)
    if match is None:
        assert name.startswith("mtp."), name
        return (MTP + name.removeprefix("mtp."),)
    inside, rest = match["place"], match["rest"]
    prefix = f"{MTP}layer." if inside == "mtp.layer" else f"{TEXT}model.{inside}."
    if expert := _EXPERT.match(rest):
        path = f"{prefix}block_sparse_moe.experts.{expert['number']}"
        return tuple(f"{path}.{part}.weight" for part in _EXPERT_PARTS[expert["linear"]])
    if rest in _FUSED:
        return tuple(prefix + part for part in _FUSED[rest])
    return (prefix + _LAYER.get(rest, rest.replace("self_attention.", "self_attn.", 1)),)


def _pieces(parameter: shapes.Parameter, layout: Layout) -> Iterator[Piece]:
    """The pieces of a tensor, or of all experts' tensors of one name."""
    keys = official_keys(parameter.name)
    rows = parameter.shape[0] // len(keys)
    shape = (rows, *parameter.shape[1:])
    packed = layout.packed and parameter.kind == "expert"
    dtype = "F32" if parameter.dtype == "fp32" else "BF16"
    made = []
    for index, key in enumerate(keys):
        form, stored = _stored(key, shape, dtype, packed)
        made.append(Piece(parameter.name, index * rows, shape, form, stored, parameter.kind))
    if shapes.EXPERT not in parameter.name:
        yield from made
        return
    for expert in range(parameter.copies):
        for piece in made:
            yield _of_expert(piece, str(expert))


def _of_expert(piece: Piece, expert: str) -> Piece:
    stored = tuple(
        Stored(key.replace(shapes.EXPERT, expert), shape, dtype) for key, shape, dtype in piece.stored
    )
    return piece._replace(name=piece.name.replace(shapes.EXPERT, expert), stored=stored)


def _stored(key: str, shape: tuple[int, ...], dtype: str, packed: bool) -> tuple[str, tuple[Stored, ...]]:
    if packed:
        rows, columns = shape
        codes = Stored(f"{key}_packed", (rows, columns // 2), "U8")
        return "mxfp4", (codes, Stored(f"{key}_scale", (rows, columns // BLOCK), "U8"))
    if key.endswith(".A_log"):
        padded = math.ceil(shape[0] / HEAD_PADDING) * HEAD_PADDING
        return "padded", (Stored(key, (padded,), dtype),)
    if key.endswith("res_proj.weight"):
        return "plain", (Stored(key, (1, *shape), dtype),)
    return "plain", (Stored(key, shape, dtype),)


def _vision_piece(parameter: shapes.Parameter, vision: VisionConfig, layout: Layout) -> Piece:
    root, tower = f"{vision_shapes.PREFIX}.", f"{vision_shapes.PREFIX}.tower."
    if parameter.name.startswith(tower):
        key = TOWER + parameter.name.removeprefix(tower)
    else:
        key = PROJECTOR + parameter.name.removeprefix(f"{root}projector.")
    shape = parameter.shape
    if key == f"{TOWER}patch_embed.proj.weight":
        shape = (shape[0], vision.channels, vision.patch_size, vision.patch_size)
    stored = (Stored(key, shape, layout.dtype),)
    return Piece(parameter.name, 0, parameter.shape, "plain", stored, parameter.kind)

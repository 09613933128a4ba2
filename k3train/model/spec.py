"""Which modules a layer is made of: megatron-core's own, or Transformer Engine's."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from ..config import ModelConfig
from ..ops.backends import resolve
from ..shapes import layer_kinds
from .experts import GroupedExperts, SequentialExperts, SiTUGLU
from .kda import KDASubmodules, KimiDeltaAttention
from .layer import DecoderLayerSubmodules
from .mla import GatedMLA, MLASubmodules
from .moe import GatedFFN, LatentMoE, LatentMoESubmodules


def layer_submodules(model: ModelConfig, layer_index: int) -> DecoderLayerSubmodules:
    """Specs of decoder layer `layer_index`; an MTP layer mirrors the last one and has index `num_layers`."""
    attention, mlp = layer_kinds(model)[min(layer_index, model.num_layers - 1)]
    linear = resolve("linear", model.backends.linear, "cuda" if torch.cuda.is_available() else "cpu")
    modules = linear.load()()
    column, row = modules.column_parallel_linear(), modules.row_parallel_linear()
    ffn = MLPSubmodules(linear_fc1=column, linear_fc2=row, activation_func=SiTUGLU)

    attention_spec = {
        "kda": ModuleSpec(KimiDeltaAttention, submodules=KDASubmodules(column, row)),
        "mla": ModuleSpec(GatedMLA, submodules=MLASubmodules(column, row)),
    }[attention]
    if mlp == "dense":
        mlp_spec = ModuleSpec(GatedFFN, params={"ffn_size": model.dense_ffn_size}, submodules=ffn)
    else:
        mlp_spec = ModuleSpec(
            LatentMoE,
            params={"layer_number": layer_index + 1},
            submodules=LatentMoESubmodules(column, row, _experts(linear.name, ffn), shared_experts=ffn),
        )
    return DecoderLayerSubmodules(attention_spec, mlp_spec)


def _experts(linear: str, ffn: MLPSubmodules) -> partial:
    if linear == "local":
        return partial(SequentialExperts, submodules=ffn)
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelGroupedLinear,
        TERowParallelGroupedLinear,
    )

    grouped = GroupedMLPSubmodules(
        linear_fc1=TEColumnParallelGroupedLinear,
        linear_fc2=TERowParallelGroupedLinear,
        activation_func=SiTUGLU,
    )
    return partial(GroupedExperts, submodules=grouped)

"""Between a released `config.json` and our model and vision sections; needs no torch.

Every key is accounted for: it sets one of ours, has to have the one value that our model computes, or is
carried along without being read. Anything else is refused, as it could change what the weights mean.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ...config import ModelConfig
from ...errors import UserError
from ...shapes import layer_kinds
from ...vision_config import VisionConfig
from .keys import BLOCK, DTYPES, Layout

FILE = "config.json"
FORMAT = "mxfp4-pack-quantized"

TEXT: dict[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "dense_ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
    "initializer_range": "init_std",
    "rms_norm_eps": "norm_eps",
    "attn_res_block_size": "attn_res_block_size",
    "num_experts": "num_experts",
    "num_experts_per_token": "top_k",
    "num_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "expert_ffn_size",
    "routed_expert_hidden_size": "latent_size",
    "routed_scaling_factor": "routed_scaling_factor",
    "first_k_dense_replace": "num_dense_layers",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_extra_head_dim",
    "v_head_dim": "v_head_dim",
    "num_nextn_predict_layers": "mtp_layers",
}
"""Key of `text_config` -> key of our model section."""
LINEAR: dict[str, str] = {
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
}
"""Key of `text_config.linear_attn_config` -> key of our model section."""
OPTIONAL: dict[str, Any] = {
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.0,
}
"""Keys that may be absent, and what that means."""
VISION: dict[str, str] = {
    "patch_size": "patch_size",
    "init_pos_emb_height": "grid_size",
    "init_pos_emb_time": "max_frames",
    "vt_num_attention_heads": "num_heads",
    "vt_num_hidden_layers": "depth",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "ffn_size",
    "projector_ln_eps": "projector_norm_eps",
}
"""Key of `vision_config` -> key of our vision section."""

FIXED_TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "tie_word_embeddings": False,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
}
FIXED_LINEAR: dict[str, Any] = {"use_full_rank_gate": True}
FIXED_VISION: dict[str, Any] = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
FIXED_TOP: dict[str, Any] = {"model_type": "kimi_k3"}
CARRIED = frozenset(
    (
        "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "auto_map",
        "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "head_dim", "id2label",
        "ignore_index", "image_placeholder", "is_decoder", "is_encoder_decoder", "label2id",
        "max_position_embeddings", "media_placeholder_token_id", "model_max_length", "model_type",
        "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_sequence_length",
        "return_dict", "rope_parameters", "rope_scaling", "rope_theta", "sep_token_id", "tie_word_embeddings",
        "torch_dtype", "transformers_version", "unk_token_id", "use_cache", "use_grouped_topk",
        "use_unified_vision_chunk", "video_attn_type", "video_placeholder",
    )
)  # fmt: skip
"""Keys that say nothing about what the weights compute: with `mla_use_nope` nothing is rotated, and with one
group of experts a choice by groups is none."""

TRAINING_ONLY = frozenset(
    ("vocab_multiple", "mtp_loss_weight", "mtp_layers", "init_std", "balance_bins", "balance_ema", "dtype",
     "backends")
)  # fmt: skip
"""Keys of our model section that may differ from those of the weights that a run starts with."""


class Description(NamedTuple):
    """What a `config.json` says."""

    model: ModelConfig
    vision: VisionConfig | None
    layout: Layout


class _Reader:
    """One section of a `config.json`; each key must be asked for, fixed or carried."""

    def __init__(self, path: Path, tree: Any, prefix: str) -> None:
        if not isinstance(tree, Mapping):
            raise UserError(f"{path}: {prefix or 'the whole'} is no mapping")
        self.path, self.tree, self.prefix = path, tree, prefix
        self.left = set(tree)

    def take(self, key: str) -> Any:
        """The value of a key, which must be there unless it is in OPTIONAL."""
        self.left.discard(key)
        if key not in self.tree and key not in OPTIONAL:
            self.refuse(key, "is missing")
        return self.tree.get(key, OPTIONAL.get(key))

    def expect(self, key: str, value: Any) -> None:
        """The value of a key, where it is there, must be the only one that our model has."""
        self.left.discard(key)
        found = self.tree.get(key, value)
        if found != value:
            self.refuse(key, f"is {found!r}; k3train computes {value!r} only")

    def finish(self, carried: frozenset[str], *, lenient: bool) -> None:
        """Refuse what is left over."""
        unknown = sorted(self.left - carried)
        if unknown and not lenient:
            self.refuse(
                unknown[0], "is unknown and might change what is computed; --accept-unknown carries it along"
            )

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UserError(f"{self.path}: {self.prefix}{key} {why}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError when the file is missing or torn."""
    try:
        tree = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(tree).__name__}")
    return tree


def read(folder: Path, *, lenient: bool = False) -> Description:
    """What the folder's `config.json` describes.

    Args:
        lenient: accept keys that are not known here.

    Raises:
        UserError: it is missing or torn, or describes something that our model does not compute.
    """
    path = folder / FILE
    tree = read_json(path)
    top = _Reader(path, tree, "")
    top.expect("model_type", "kimi_k3")
    text = _Reader(path, top.take("text_config"), "text_config.")
    quantization = tree.get("quantization_config") or text.tree.get("quantization_config")
    for reader in (top, text):
        reader.left.discard("quantization_config")
    model = _model(text, lenient)
    top.left.discard("vision_config")
    vision = _vision(path, tree["vision_config"], model, lenient) if tree.get("vision_config") else None
    top.finish(CARRIED, lenient=lenient)
    packed = quantization is not None
    if quantization is not None:
        _check_quantization(path, quantization)
    return Description(model, vision, Layout(DTYPES[model.dtype], packed, bool(model.mtp_layers)))


def _model(text: _Reader, lenient: bool) -> ModelConfig:
    model = ModelConfig(**{ours: text.take(theirs) for theirs, ours in TEXT.items()})
    for key, value in FIXED_TEXT.items():
        text.expect(key, value)
    text.expect("num_key_value_heads", model.num_heads)
    dtype = text.tree.get("dtype") or text.tree.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPES:
        text.refuse("dtype", f"is {dtype!r}; valid are {', '.join(DTYPES)}")
    model.dtype = dtype
    linear = _Reader(text.path, text.take("linear_attn_config"), "text_config.linear_attn_config.")
    for theirs, ours in LINEAR.items():
        setattr(model, ours, linear.take(theirs))
    for key, value in FIXED_LINEAR.items():
        linear.expect(key, value)
    linear.expect("num_heads", model.num_heads)
    full = linear.take("full_attn_layers")
    model.full_attention_every = full[0] if full else model.num_layers
    for key, layers in _attention_layers(model).items():
        linear.expect(key, layers)
    linear.finish(frozenset(), lenient=lenient)
    text.finish(CARRIED, lenient=lenient)
    if model.mtp_layers not in (0, 1):
        text.refuse("num_nextn_predict_layers", f"is {model.mtp_layers}; k3train has 0 or 1")
    return model


def _attention_layers(model: ModelConfig) -> dict[str, list[int]]:
    """The two lists of 1-based layer numbers."""
    kinds = [attention for attention, _ in layer_kinds(model)]
    names = {"kda_layers": "kda", "full_attn_layers": "mla"}
    return {
        key: [number for number, found in enumerate(kinds, 1) if found == kind] for key, kind in names.items()
    }


def _vision(path: Path, tree: Any, model: ModelConfig, lenient: bool) -> VisionConfig:
    reader = _Reader(path, tree, "vision_config.")
    vision = VisionConfig(enabled=True, **{ours: reader.take(theirs) for theirs, ours in VISION.items()})
    channels = reader.take("qkv_hidden_size")
    if channels % vision.num_heads:
        reader.refuse("qkv_hidden_size", f"is {channels}, no multiple of {vision.num_heads} heads")
    vision.head_dim = channels // vision.num_heads
    kernel = list(reader.take("merge_kernel_size"))
    if len(kernel) != 2 or kernel[0] != kernel[1]:
        reader.refuse("merge_kernel_size", f"is {kernel}; k3train merges squares only")
    vision.merge = kernel[0]
    for key, value in {**FIXED_VISION, **_vision_widths(vision, model)}.items():
        reader.expect(key, value)
    reader.finish(CARRIED, lenient=lenient)
    return vision


def _vision_widths(vision: VisionConfig, model: ModelConfig) -> dict[str, int]:
    """Keys that repeat what others say."""
    return {
        "init_pos_emb_width": vision.grid_size,
        "mm_hidden_size": vision.hidden_size,
        "text_hidden_size": model.hidden_size,
    }


def _check_quantization(path: Path, tree: Mapping[str, Any]) -> None:
    reader = _Reader(path, tree, "quantization_config.")
    reader.expect("quant_method", "compressed-tensors")
    if reader.take("format") != FORMAT:
        reader.refuse("format", f"is {tree['format']!r}; k3train reads {FORMAT!r} only")
    groups = reader.take("config_groups")
    for name, group in groups.items():
        weights = _Reader(path, group.get("weights"), f"quantization_config.config_groups.{name}.weights.")
        for key, value in {"num_bits": 4, "type": "float", "group_size": BLOCK, "symmetric": True}.items():
            weights.expect(key, value)


def quantization_config() -> dict[str, Any]:
    """What the release says about its packed experts."""
    weights = {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True,
        "dynamic": False, "observer": "minmax", "scale_dtype": "torch.uint8",
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
    }


def build(
    model: ModelConfig, vision: VisionConfig | None, layout: Layout, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A `config.json` for a model.

    Args:
        base: the `config.json` that its weights came with, whose other keys are carried over.

    Raises:
        UserError: the released model has no key for a value of ours.
    """
    _check_expressible(model, vision)
    tree: dict[str, Any] = copy.deepcopy(dict(base)) if base else _fresh()
    dtype = next(name for name, stored in DTYPES.items() if stored == layout.dtype)
    text = tree.setdefault("text_config", {})
    text.update(FIXED_TEXT)
    text.update({theirs: getattr(model, ours) for theirs, ours in TEXT.items()})
    text["num_key_value_heads"] = model.num_heads
    text["num_nextn_predict_layers"] = int(layout.mtp)
    text["linear_attn_config"] = {
        **_attention_layers(model),
        "num_heads": model.num_heads,
        **{theirs: getattr(model, ours) for theirs, ours in LINEAR.items()},
        **FIXED_LINEAR,
    }
    for section in (tree, text):
        section.update({key: dtype for key in ("dtype", "torch_dtype") if key in section})
    if "torch_dtype" not in text:
        text["dtype"] = dtype
    known = [section.pop("quantization_config", None) for section in (tree, text)]
    if layout.packed:
        text["quantization_config"] = known[1] or known[0] or quantization_config()
    section = _vision_section(tree.pop("vision_config", None), vision, model)
    return {**tree, **({"vision_config": section} if section else {})}


def _fresh() -> dict[str, Any]:
    tree = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": ""}
    return {**tree, "text_config": {"architectures": ["KimiLinearForCausalLM"]}}


def _vision_section(
    base: Mapping[str, Any] | None, vision: VisionConfig | None, model: ModelConfig
) -> dict[str, Any] | None:
    """`vision_config` of a tower, if there is one."""
    if vision is None:
        return None
    return {
        **(base or {}),
        **{theirs: getattr(vision, ours) for theirs, ours in VISION.items()},
        "qkv_hidden_size": vision.num_heads * vision.head_dim,
        "merge_kernel_size": [vision.merge, vision.merge],
        **FIXED_VISION,
        **_vision_widths(vision, model),
    }


def _check_expressible(model: ModelConfig, vision: VisionConfig | None) -> None:
    """Refuse values that the released classes fix and no key of `config.json` can change."""
    released, tower = ModelConfig(), VisionConfig()
    if model.mla_norm_eps != released.mla_norm_eps:
        raise UserError(
            f"model.mla_norm_eps={model.mla_norm_eps:g}: the released layout has {released.mla_norm_eps:g} "
            "and no key for it"
        )
    for key in ("channels", "rope_theta", "rope_max") if vision is not None else ():
        if getattr(vision, key) > getattr(tower, key) or (
            key != "rope_max" and getattr(vision, key) != getattr(tower, key)
        ):
            raise UserError(
                f"vision.{key}={getattr(vision, key)}: the released layout has {getattr(tower, key)} "
                "and no key for it"
            )


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(key, our value, their value) of the model section, where weights of one could not be the other's."""
    found = []
    for entry in fields(ModelConfig):
        a, b = getattr(ours, entry.name), getattr(theirs, entry.name)
        if entry.name not in TRAINING_ONLY and a != b:
            found.append((entry.name, a, b))
    return found

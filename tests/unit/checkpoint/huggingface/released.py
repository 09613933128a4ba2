"""Small random checkpoints as a release holds them, by the safetensors library and a table of nibbles."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.reference_k3 import shapes

Pair = tuple[dict[str, Tensor], dict[str, Tensor]]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}

TEXT: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "attn_res_block_size": 2,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.25,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4, 5],
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "num_nextn_predict_layers": 0,
}
VISION: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 64,
    "qkv_hidden_size": 48,
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "mm_hidden_size": 32,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 64,
}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True},
            "input_activations": None,
        }
    },
}


def tree(*, vision: bool = True, packed: bool = False, **text: Any) -> dict[str, Any]:
    """A config.json; `text` replaces keys of its `text_config`."""
    made = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "media_placeholder_token_id": 300,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "ignore_index": -100,
        "pad_token_id": 319,
        "text_config": {**copy.deepcopy(TEXT), **text},
    }
    if vision:
        made["vision_config"] = copy.deepcopy(VISION)
    if packed:
        made["text_config"]["quantization_config"] = copy.deepcopy(QUANTIZATION)
    return made


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the released keys, experts unpacked, every part large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for key, (dtype, shape) in shapes(config).items():
        value = torch.randn(shape, generator=generator)
        if key.endswith(("norm.weight", "norm0.weight", "norm1.weight", "layernorm.weight")):
            value = 1 + 0.2 * value
        elif key.endswith(".A_log"):
            value = 0.3 * value
            value[config["text_config"]["num_attention_heads"] :] = 0
        elif key.endswith(("e_score_correction_bias", "pos_emb.weight")):
            value = 0.1 * value
        elif not key.endswith("dt_bias"):
            value = 1.5 * value / math.sqrt(math.prod(shape[1:]))
        made[key] = value.to(DTYPES[dtype])
    return made


def packed_weights(config: dict[str, Any], seed: int = 0, *, normal: bool = True) -> Pair:
    """(as stored, unpacked): random nibbles and scales for the experts.

    `normal`: every block has a 4 or a 6 in it, as the OCP rule makes them.
    """
    plain = weights(config, seed)
    stored, generator = {}, torch.Generator().manual_seed(seed + 1)
    for key, value in list(plain.items()):
        if ".experts." not in key:
            stored[key] = value
            continue
        rows, columns = value.shape
        codes = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
        if normal:
            codes[:, ::32] = 6 + codes[:, ::32] % 2 + 8 * (codes[:, ::32] // 8)
        else:
            codes = codes % 4  # up to 1.5: the OCP rule would choose a smaller scale
        scales = torch.randint(121, 125, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        stored[f"{key}_packed"] = codes[:, 0::2] + 16 * codes[:, 1::2]
        stored[f"{key}_scale"] = scales
        multipliers = torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
        plain[key] = (torch.tensor(E2M1).double()[codes.long()] * multipliers).to(torch.bfloat16)
    return stored, plain


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], files: int = 3) -> Path:
    """Write a folder of several files with an index, and what stands beside them in a release."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    keys = list(tensors)
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        own = keys[number::files]
        save_file({key: tensors[key].contiguous() for key in own}, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(own, name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "generation_config.json").write_text('{"eos_token_id": 586}\n')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer"}\n')
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    return folder


def load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read by the safetensors library through the index."""
    from safetensors import safe_open

    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name in sorted(set(weight_map.values())):
        with safe_open(folder / name, "pt") as file:
            keys = list(file.keys())
            assert sorted(keys) == sorted(key for key, other in weight_map.items() if other == name)
            found.update({key: file.get_tensor(key) for key in keys})
    return found


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether keys, shapes, dtypes and every bit agree."""
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype
        and first[key].shape == second[key].shape
        and torch.equal(first[key].view(-1).view(torch.uint8), second[key].view(-1).view(torch.uint8))
        for key in first
    )


def unpacked(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every packed tensor as the numbers it stands for, in BF16; by a table, one nibble after the other."""
    plain = {}
    for key, value in stored.items():
        if key.endswith("_packed"):
            scales = stored[key.replace("_packed", "_scale")]
            codes = torch.stack((value % 16, value // 16), dim=-1).flatten(1)
            multipliers = torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
            numbers = torch.tensor(E2M1).double()[codes.long()] * multipliers
            plain[key.removesuffix("_packed")] = numbers.to(torch.bfloat16)
        elif not key.endswith("_scale"):
            plain[key] = value
    return plain

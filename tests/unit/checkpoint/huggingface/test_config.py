"""`config.json`: every key sets something, is checked, or is carried; nothing else passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.huggingface.config import build, read
from k3train.checkpoint.huggingface.keys import Layout
from k3train.config import ModelConfig
from k3train.errors import UserError
from k3train.vision_config import VisionConfig
from tests.unit.checkpoint.huggingface import released


def _write(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def test_a_released_configuration_comes_back_as_it_was(tmp_path: Path) -> None:
    for packed in (False, True):
        tree = released.tree(packed=packed)
        model, vision, layout = read(_write(tmp_path, tree))
        assert layout == Layout("BF16", packed=packed)
        assert build(model, vision, layout, tree) == tree


def test_values_arrive_under_our_names(tmp_path: Path) -> None:
    model, vision, _ = read(_write(tmp_path, released.tree()))
    assert (model.num_layers, model.full_attention_every, model.top_k) == (5, 4, 2)
    assert (model.latent_size, model.qk_extra_head_dim, model.dense_ffn_size) == (32, 16, 192)
    assert (model.kda_head_dim, model.routed_scaling_factor, model.mtp_layers) == (16, 1.25, 0)
    assert vision is not None
    assert (vision.enabled, vision.head_dim, vision.depth, vision.merge, vision.grid_size) == (
        True,
        24,
        2,
        2,
        4,
    )


def test_a_configuration_of_our_own_is_read_back(tmp_path: Path) -> None:
    model = ModelConfig(vocab_size=4096, dtype="float32", mtp_layers=1, init_std=0.01)
    tower = VisionConfig(enabled=True, depth=3, hidden_size=96, num_heads=3, head_dim=32)
    layout = Layout("F32", packed=True, mtp=True)
    again = read(_write(tmp_path, build(model, tower, layout)))
    assert again == (model, tower, layout)


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        *sections, key = path.split(".")
        for section in sections:
            tree = tree[section]
        if value is None:
            del tree[key]
        else:
            tree[key] = value

    return change


FAULTS: dict[str, tuple[str, Any, str]] = {
    "unknown": ("text_config.rotary_fraction", 0.5, "text_config.rotary_fraction is unknown"),
    "unknown in vision": ("vision_config.registers", 4, "vision_config.registers is unknown"),
    "missing": ("text_config.q_lora_rank", None, "text_config.q_lora_rank is missing"),
    "another activation": ("text_config.hidden_act", "silu", "hidden_act is 'silu'; k3train computes 'situ'"),
    "tied": ("text_config.tie_word_embeddings", True, "tie_word_embeddings is True; k3train"),
    "groups": ("text_config.num_expert_group", 8, "num_expert_group is 8; k3train computes 1 only"),
    "layers": ("text_config.linear_attn_config.kda_layers", [1, 2, 4], "kda_layers is [1, 2, 4]"),
    "quantised otherwise": (
        "text_config.quantization_config",
        {**released.QUANTIZATION, "format": "nvfp4-pack-quantized"},
        "format is 'nvfp4-pack-quantized'",
    ),
    "a rectangle": ("vision_config.merge_kernel_size", [2, 4], "merge_kernel_size is [2, 4]"),
    "another model": ("model_type", "kimi_k2", "model_type is 'kimi_k2'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_would_change_the_meaning_is_refused(name: str, tmp_path: Path) -> None:
    path, value, message = FAULTS[name]
    tree = released.tree()
    _set(path, value)(tree)
    with pytest.raises(UserError) as caught:
        read(_write(tmp_path, tree))
    assert message in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


def test_unknown_keys_can_be_accepted_and_are_carried(tmp_path: Path) -> None:
    tree = released.tree(rotary_fraction=0.5)
    model, vision, layout = read(_write(tmp_path, tree), lenient=True)
    assert build(model, vision, layout, tree)["text_config"]["rotary_fraction"] == 0.5


def test_what_no_key_can_say_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.mla_norm_eps=1e-05: the released layout has 1e-06"):
        build(ModelConfig(vocab_size=320, mla_norm_eps=1e-5), None, Layout())

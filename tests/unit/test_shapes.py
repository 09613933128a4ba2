from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from k3train import shapes
from k3train.config import Config, ModelConfig
from k3train.errors import UserError
from tests.dist.launch import run_workers

TINY = ModelConfig(vocab_size=4096)
SMALL = ModelConfig(
    num_layers=17, hidden_size=1024, vocab_size=32768, num_heads=16, kda_head_dim=128, q_lora_rank=384,
    kv_lora_rank=256, qk_nope_head_dim=128, qk_extra_head_dim=64, v_head_dim=128, num_experts=64, top_k=8,
    latent_size=512, expert_ffn_size=448, dense_ffn_size=4928,
)  # fmt: skip
MEDIUM = replace(
    SMALL, num_layers=25, hidden_size=2048, vocab_size=65536, num_heads=32, q_lora_rank=768, kv_lora_rank=512,
    num_experts=128, latent_size=1024, expert_ffn_size=896, dense_ffn_size=9856,
)  # fmt: skip
K3 = replace(
    SMALL, num_layers=93, hidden_size=7168, vocab_size=163840, num_heads=96, q_lora_rank=1536,
    kv_lora_rank=512, num_experts=896, top_k=16, latent_size=3584, expert_ffn_size=3072, dense_ffn_size=33792,
    attn_res_block_size=12, dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "total", "active", "unit"),
    [
        (TINY, 17.1, 7.8, 1e6),
        (SMALL, 1.016, 0.366, 1e9),
        (replace(SMALL, num_experts=448), 5.25, 0.372, 1e9),
        (MEDIUM, 10.13, 2.07, 1e9),
        (K3, 2779.48, 104.19, 1e9),
    ],
    ids=["tiny", "small", "small-56x", "medium", "k3"],
)
def test_sizes_equal_the_published_table(
    model: ModelConfig, total: float, active: float, unit: float
) -> None:
    for count, published in ((shapes.total(model), total), (shapes.active(model), active)):
        decimals = len(str(published).partition(".")[2])
        assert round(count / unit, decimals) == published


def count(prefix: str, *, without: str = "") -> float:
    """Millions of K3's parameters below a prefix."""
    entries = (entry for entry in shapes.compact_parameters(K3) if entry.name.startswith(prefix))
    return sum(entry.numel for entry in entries if not without or without not in entry.name) / 1e6


def test_parts_of_k3_equal_the_recount() -> None:
    assert round(count("layers.1.self_attention"), 1) == 443.7
    assert round(count("layers.3.self_attention"), 1) == 232.2
    assert round(count("layers.1.mlp.experts") / 896, 2) == 33.03
    assert round(count("layers.1.mlp.shared_experts"), 1) == 132.1
    assert round(count("layers.1.mlp.", without=".experts."), 1) == 189.9
    assert round(count("layers.0.mlp."), 1) == 726.7
    assert round(shapes.count_by_kind(K3)["expert"] / 1e9, 1) == 2722.7
    assert round(shapes.count_by_kind(K3)["mtp"] / 1e9, 1) == 30.1


def test_kinds_of_k3_layers() -> None:
    kinds = shapes.layer_kinds(K3)
    assert Counter(attention for attention, _ in kinds) == {"kda": 69, "mla": 24}
    assert [number for number, (attention, _) in enumerate(kinds, start=1) if attention == "mla"] == [
        *range(4, 93, 4),
        93,
    ]
    assert [mlp for _, mlp in kinds] == ["dense"] + ["moe"] * 92


def test_a_model_without_experts_is_dense_everywhere() -> None:
    assert {mlp for _, mlp in shapes.layer_kinds(replace(TINY, num_experts=0))} == {"dense"}
    assert list(shapes.buffers(replace(TINY, num_experts=0))) == []


def test_every_expert_has_its_own_name() -> None:
    names = [entry.name for entry in shapes.parameters(TINY)]
    assert len(names) == len(set(names))
    assert "layers.8.mlp.experts.31.linear_fc2.weight" in names
    assert "mtp.layer.mlp.experts.0.linear_fc1.weight" in names
    assert sum(".experts." in name for name in names) == 9 * 32 * 2


def test_expanding_experts_keeps_the_sum() -> None:
    expanded = sum(entry.numel for entry in shapes.parameters(TINY))
    assert expanded == sum(entry.numel for entry in shapes.compact_parameters(TINY))
    assert expanded == shapes.total(TINY) + shapes.count_by_kind(TINY)["mtp"]


def test_fp32_exceptions_of_a_bf16_model() -> None:
    names = [entry.name for entry in shapes.compact_parameters(K3) if entry.dtype == "fp32"]
    assert {name.partition("self_attention.")[2] for name in names} == {
        "q_conv",
        "k_conv",
        "v_conv",
        "A_log",
        "dt_bias",
        "o_norm.weight",
    }


def test_shapes_of_k3_tensors() -> None:
    shape = {entry.name: entry.shape for entry in shapes.compact_parameters(K3)}
    assert shape["layers.3.self_attention.q_b_proj.weight"] == (18432, 1536)
    assert shape["layers.3.self_attention.kv_a_proj.weight"] == (576, 7168)
    assert shape["layers.3.self_attention.kv_b_proj.weight"] == (24576, 512)
    assert shape["layers.1.self_attention.q_conv"] == (12288, 1, 4)
    assert shape["layers.1.mlp.shared_experts.linear_fc1.weight"] == (12288, 7168)
    assert shape["layers.1.mlp.experts.{expert}.linear_fc1.weight"] == (6144, 3584)
    assert shape["mtp.proj.weight"] == (7168, 14336)


def test_only_the_unread_site_is_frozen() -> None:
    frozen = [entry.name for entry in shapes.compact_parameters(K3) if not entry.trainable]
    assert frozen == ["layers.0.attention_res.query", "layers.0.attention_res.norm_weight"]


def test_balance_biases_stand_beside_the_parameters() -> None:
    biases = list(shapes.buffers(TINY))
    assert len(biases) == 8 + 1
    assert biases[0] == shapes.Parameter(
        "layers.1.mlp.router.expert_bias", (32,), "fp32", "router", 1, trainable=False
    )


def test_vocabulary_is_rounded_up_or_asked_for() -> None:
    assert shapes.vocab_rows(ModelConfig(), 259) == 320
    assert shapes.vocab_rows(ModelConfig(), 320) == 320
    assert shapes.vocab_rows(TINY, 259) == 4096
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        shapes.vocab_rows(ModelConfig())


BUILT = {
    "tiny": ModelConfig(vocab_size=320),
    "bf16": ModelConfig(vocab_size=320, dtype="bfloat16"),
    "dense without MTP": ModelConfig(vocab_size=320, num_layers=5, num_experts=0, mtp_layers=0),
    "no two sizes alike": ModelConfig(
        vocab_size=192, num_layers=3, hidden_size=40, num_heads=3, kda_head_dim=16, q_lora_rank=20,
        kv_lora_rank=12, qk_nope_head_dim=8, qk_extra_head_dim=4, v_head_dim=24, num_experts=6, top_k=2,
        num_shared_experts=3, latent_size=28, expert_ffn_size=26, dense_ffn_size=44, num_dense_layers=2,
        short_conv_kernel_size=3, full_attention_every=2,
    ),
}  # fmt: skip


def build() -> dict[str, dict[str, list[list[Any]]]]:
    """[name, shape, dtype, trainable] of what each real model holds; runs in a process of its own."""
    from k3train.model.decoder import LanguageModelChunk
    from k3train.model.naming import named_parameters
    from k3train.model.transformer_config import transformer_config
    from parallel import groups
    from parallel.topology import Topology

    collection = groups.initialize(Topology(), timeout_minutes=1, seed=1).pg_collection
    held = {}
    for name, model in BUILT.items():
        layers = range(model.num_layers)
        chunk = LanguageModelChunk(transformer_config(Config(model=model)), layers, collection)
        saved = chunk.state_dict().keys()
        held[name] = {
            "parameters": [entry(*pair) for pair in named_parameters(chunk)],
            "buffers": [entry(*pair) for pair in chunk.named_buffers() if pair[0] in saved],
        }
    groups.destroy()
    return held


def entry(name: str, tensor: Any) -> list[Any]:
    dtype = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}[str(tensor.dtype)]
    return [name, list(tensor.shape), dtype, tensor.requires_grad]


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, list[list[Any]]]]:
    [held] = run_workers("tests.unit.test_shapes:build", 1)
    return held


@pytest.mark.parametrize("name", BUILT)
def test_tensors_equal_those_of_the_built_model(
    name: str, built: dict[str, dict[str, list[list[Any]]]]
) -> None:
    for kind, listed in (("parameters", shapes.parameters), ("buffers", shapes.buffers)):
        expected = [[e.name, list(e.shape), e.dtype, e.trainable] for e in listed(BUILT[name])]
        assert sorted(built[name][kind]) == sorted(expected)

"""The table of Per-Head Muon against the published shapes of Kimi K3, and the blocks of each matrix."""

from __future__ import annotations

import pytest

from k3train.config import Config
from k3train.optim.groups import Group, groups, moments, newton_schulz_flops, split, total_flops
from k3train.shapes import Parameter, compact_parameters
from launch.compose import compose


@pytest.fixture(scope="module")
def k3() -> Config:
    return compose(["recipe=k3_pretrain", "optim=muon_per_head"])


def shown(group: Group) -> tuple[object, ...]:
    return group.rule, group.split, group.shapes, group.matrices, group.blocks


def test_kimi_k3_is_cut_as_the_report_says(k3: Config) -> None:
    table = {group.name: shown(group) for group in groups(k3)}
    # 69 KDA layers, 24 of Gated MLA and the MTP layer's, 92 MoE layers and the MTP layer's.
    for name in ("q_proj", "k_proj", "v_proj"):
        assert table[f"kda {name}"] == ("muon", "heads", ((128, 7168),), 69, 69 * 96)
    assert table["mla q_b_proj"] == ("muon", "heads", ((192, 1536),), 25, 25 * 96)
    assert table["mla kv_b_proj"] == ("muon", "heads, K and V", ((128, 512),), 25, 25 * 96 * 2)
    whole = {
        "kda o_proj": ((7168, 12288), 69),
        "kda g_proj": ((12288, 7168), 69),
        "kda f_a_proj": ((128, 7168), 69),
        "kda f_b_proj": ((12288, 128), 69),
        "kda b_proj": ((96, 7168), 69),
        "mla q_a_proj": ((1536, 7168), 25),
        "mla kv_a_proj": ((576, 7168), 25),
        "mla o_proj": ((7168, 12288), 25),
        "mla g_proj": ((12288, 7168), 25),
        "router": ((896, 7168), 93),
        "latent_down": ((3584, 7168), 93),
        "latent_up": ((7168, 3584), 93),
        "shared_expert linear_fc2": ((7168, 6144), 93),
        "dense_ffn linear_fc2": ((7168, 33792), 1),
        "mtp proj": ((7168, 14336), 1),
    }
    for name, (shape, count) in whole.items():
        assert table[name] == ("muon", "whole", (shape,), count, count), name
    assert table["shared_expert linear_fc1"] == ("muon", "gate and up", ((6144, 7168),), 93, 186)
    assert table["dense_ffn linear_fc1"] == ("muon", "gate and up", ((33792, 7168),), 1, 2)
    experts = 93 * 896
    assert table["expert linear_fc1"] == ("muon", "gate and up", ((3072, 3584),), experts, 2 * experts)
    assert table["expert linear_fc2"] == ("muon", "whole", ((3584, 3072),), experts, experts)


def test_every_parameter_is_in_one_group(k3: Config) -> None:
    found = groups(k3)
    assert sum(group.numel for group in found) == sum(
        entry.numel for entry in compact_parameters(k3.model) if entry.trainable
    )
    assert {group.name for group in found if group.rule == "adamw"} == {
        "embedding", "head", "norm", "attn_res vectors", "kda convolutions", "kda vectors", "latent vectors",
        "mla vectors", "mtp vectors",
    }  # fmt: skip
    assert [group.rule for group in found] == sorted((g.rule for g in found), reverse=True)


def test_a_kda_projection_costs_seventy_times_less_head_by_head(k3: Config) -> None:
    heads = next(group for group in groups(k3) if group.name == "kda q_proj")
    whole = 69 * newton_schulz_flops((12288, 7168), 5)
    assert whole / 69 / 5 == pytest.approx(3.26e12, rel=3e-3)
    assert whole / heads.flops == pytest.approx(72, rel=0.01)
    assert total_flops(groups(k3)) == pytest.approx(2.474e17, rel=1e-3)


def test_the_tower_is_updated_too(k3: Config) -> None:
    config = compose(["recipe=tiny", "optim=muon_per_head", "model.vocab_size=320"])
    tower = {group.name: shown(group) for group in groups(config) if group.name.startswith(("vi", "pro"))}
    vision = config.vision
    channels, d = vision.num_heads * vision.head_dim, vision.hidden_size
    depth = vision.depth
    assert tower["vision wqkv"] == ("muon", "Q, K and V", ((channels, d),), depth, 3 * depth)
    assert {name for name, row in tower.items() if row[0] == "adamw"} == {
        "vision proj", "vision pos_emb", "vision vectors", "projector vectors",
    }  # fmt: skip
    assert {"projector proj.0", "projector proj.2"} <= tower.keys()


def test_keys_and_values_of_a_head_are_blocks_of_their_own(k3: Config) -> None:
    model = compose(["recipe=tiny", "model.num_heads=2", "model.v_head_dim=16"]).model
    rows = 2 * (64 + 16)
    cut = split(Parameter("layers.3.self_attention.kv_b_proj.weight", (rows, 10), "fp32", "mla", 3), model)
    assert cut is not None and cut.blocks(10) == [
        (0, 640, (64, 10)), (640, 800, (16, 10)), (800, 1440, (64, 10)), (1440, 1600, (16, 10)),
    ]  # fmt: skip


def test_muon_keeps_one_moment_and_adamw_two(k3: Config) -> None:
    by_rule = {2: 0, 1: 0}
    for entry in compact_parameters(k3.model):
        by_rule[moments(entry, k3)] += entry.numel * entry.trainable
    table = groups(k3)
    assert by_rule[1] == sum(group.numel for group in table if group.rule == "muon")
    assert by_rule[2] == sum(group.numel for group in table if group.rule == "adamw")

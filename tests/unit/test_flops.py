from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from k3train import flops, shapes
from k3train.config import ModelConfig

K3_YAML = Path(__file__).parents[2] / "conf" / "model" / "k3.yaml"
TINY = ModelConfig(vocab_size=4096)
K3 = ModelConfig(**yaml.safe_load(K3_YAML.read_text()))
S = 256

# Hidden 256, 4 heads of 64, 32 experts top-4, latent 128, expert width 96: by hand from the spec's shapes.
KDA_WEIGHTS = 5 * 256 * 256 + 4 * 256 + 64 * 256 + 256 * 64
MLA_WEIGHTS = 96 * 256 + 384 * 96 + 96 * 256 + 512 * 64 + 256 * 256 + 256 * 256


def test_attention_of_tiny_by_hand() -> None:
    kda, mla = flops.layer_flops(TINY, 1, S), flops.layer_flops(TINY, 3, S)
    assert kda["kda_projection"] == 2 * KDA_WEIGHTS
    assert kda["kda_core"] == 4 * (6 * 64 * 64 + 3 * 64 * 64 + 64 * 64) + 3 * 256 * 4 * 2
    assert mla["mla_projection"] == 2 * MLA_WEIGHTS
    assert mla["mla_core"] == 4 * (96 + 64) * S
    assert "mla_core" not in kda and "kda_core" not in mla


def test_feed_forward_of_tiny_by_hand() -> None:
    dense, moe = flops.layer_flops(TINY, 0, S), flops.layer_flops(TINY, 1, S)
    assert dense["dense"] == 6 * 256 * 1056
    assert (moe["router"], moe["latent"]) == (2 * 256 * 32, 4 * 256 * 128)
    assert (moe["experts"], moe["shared"]) == (4 * 6 * 128 * 96, 6 * 256 * 192)


def test_sources_of_k3_sites() -> None:
    # A block of twelve layers starts after the attention site of layers 0, 12, 24, ...
    assert [flops.site_sources(K3, layer) for layer in (0, 1, 11, 12, 13, 92)] == [
        (0, 2), (2, 2), (2, 2), (2, 3), (3, 3), (9, 9),
    ]  # fmt: skip
    # Square, logit and share of each source: three multiplications and additions a channel.
    assert flops.layer_flops(K3, 12, S)["attn_res"] == 6 * 7168 * (2 + 3)
    assert flops.output_flops(K3, S)["attn_res"] == 6 * 7168 * 9


def test_matrix_products_are_two_flops_a_weight() -> None:
    """What is not attention core, AttnRes or convolution is twice the active matrices, head included."""
    model = replace(K3, mtp_layers=0)
    spent = flops.forward_flops_per_token(model, 8192)
    products = sum(spent.values()) - spent["kda_core"] - spent["mla_core"] - spent["attn_res"]
    matrices = sum(
        entry.numel // entry.copies * (model.top_k if entry.kind == "expert" else 1)
        for entry in shapes.compact_parameters(model)
        if len(entry.shape) == 2 and entry.kind != "embedding"
    )
    assert products == 2 * matrices


def test_k3_at_8k_is_six_times_active_and_its_attention() -> None:
    model = replace(K3, mtp_layers=0)
    trained = flops.train_flops_per_token(model, 8192)
    cores = 3 * (24 * 8192 * 96 * (192 + 128) + 69 * 96 * (6 * 128**2 + 3 * 64 * 128 + 64**2))
    assert trained == pytest.approx(6 * shapes.active(model) + cores, rel=5e-4)


def test_only_softmax_attention_grows_with_the_sequence() -> None:
    short, long = (flops.forward_flops_per_token(TINY, s) for s in (S, 4 * S))
    grown = {site for site in short if long[site] != short[site]}
    assert grown == {"mla_core", "mtp"}
    assert long["mla_core"] == 4 * short["mla_core"]


def test_mtp_is_a_layer_a_fusion_and_a_second_head() -> None:
    spent = flops.forward_flops_per_token(TINY, S)
    last = flops.layer_flops(TINY, 8, S)
    assert spent["mtp"] == sum(last.values()) - last["attn_res"] + 4 * 256 * 256 + spent["head"]
    assert spent["head"] == 2 * 256 * 4096


def test_dense_model_spends_nothing_on_experts() -> None:
    model = ModelConfig(vocab_size=320, num_experts=0, num_layers=5, mtp_layers=0)
    spent = flops.forward_flops_per_token(model, S)
    assert spent["dense"] == 5 * 6 * 256 * 1056
    assert {"experts", "router", "latent", "shared", "mtp"}.isdisjoint(spent)

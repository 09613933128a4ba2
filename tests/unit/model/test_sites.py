"""What the model saves for backward lies at the sites, and takes the bytes, that the plan counts with."""

from __future__ import annotations

import pytest
import torch

from k3train import activation_bytes, activation_costs, flops
from k3train.activation_sites import SITES, Saved, held_bytes, is_region, sites
from k3train.config import Config
from k3train.vision_config import VisionConfig
from launch.compose import compose
from parallel.moonep.layer import MoonEP
from tests.dist.launch import run_workers
from tests.unit.model.workers import saved_by_tower

# Layers: KDA and dense, KDA and MoE, MLA and MoE; as many tokens as chunks of 16 hold.
LAYERS = [
    "model.num_layers=3",
    "model.full_attention_every=3",
    "model.mtp_layers=1",
    "data.sequence_length=48",
]
MODELS = {
    "all-to-all, fp32": [],
    "all-to-all, bf16": ["model.dtype=bfloat16"],
    "deterministic, bf16": ["model.dtype=bfloat16", "run.deterministic=true"],
    "moonep, bf16": ["model.dtype=bfloat16", "parallel.expert.dispatcher=moonep"],
    "qat, bf16": ["model.dtype=bfloat16", "model.latent_size=32", "quant=mxfp4_qat"],
    "loss in chunks, bf16": ["model.dtype=bfloat16", "model.backends.cross_entropy=chunked"],
    "plain loss, fp32": ["model.backends.cross_entropy=reference"],
    "equal heads": ["model.v_head_dim=24", "model.num_experts=0", "data.micro_batch_size=1"],
}
NAMES = [site.name for site in SITES if not site.name.endswith("layer")]
POLICIES = {
    "nothing": {},
    "gates and norms": {"*.gate": "recompute", "*.norm": "recompute", "*.mix": "recompute"},
    "every other": {name: "recompute" for name in NAMES[::2]},
    "the others": {name: "recompute" for name in NAMES[1::2]},
    "every region": {"*.*": "recompute", "head": "recompute", "mtp.layer": "keep"},
}
TOWER = VisionConfig(
    enabled=True, depth=3, hidden_size=64, num_heads=2, head_dim=40, ffn_size=160, rope_max=64,
    max_patches=1024,
)  # fmt: skip


def k3(*overrides: str) -> Config:
    return compose(["recipe=h200_slice", *overrides])


@pytest.mark.parametrize("model", MODELS)
def test_every_site_holds_what_the_plan_counts(model: str) -> None:
    (answer,) = run_workers(
        "tests.unit.model.workers:saved_by_site", 1, {"overrides": [*LAYERS, *MODELS[model]]}
    )
    assert list(answer) == ["0", "1", "2", "end"]
    wrong = {
        (unit, site): pair
        for unit, found in answer.items()
        for site, pair in found.items()
        if pair[0] != pytest.approx(pair[1], rel=0.01)
    }
    assert not wrong, "measured, planned bytes of a token"
    assert {site for found in answer.values() for site in found} <= {site.name for site in SITES}


@pytest.mark.parametrize(
    "model", ["all-to-all, fp32", "all-to-all, bf16", "moonep, bf16", "qat, bf16", "loss in chunks, bf16"]
)
def test_the_manager_holds_what_the_plan_counts(model: str) -> None:
    arguments = {"overrides": [*LAYERS, *MODELS[model]], "policies": list(POLICIES.values())}
    (answers,) = run_workers("tests.unit.model.workers:held_under", 1, arguments)
    wrong = {
        (policy, site): pair
        for policy, answer in zip(POLICIES, answers, strict=True)
        for site, pair in answer.items()
        if pair[0] != pytest.approx(pair[1], rel=0.01)
    }
    assert not wrong, "measured, planned bytes of a token"


def test_a_route_takes_what_the_plan_counts() -> None:
    config = k3("parallel.expert.dispatcher=moonep", "model.num_experts=32", "model.top_k=4")
    layer = activation_bytes.decoder_layer(config, 1, "cuda")
    (planned,) = (tensor.bytes for tensor in layer if tensor.what == activation_bytes.ROUTE)
    choice = torch.rand(512, 32, generator=torch.Generator().manual_seed(1)).topk(4).indices.contiguous()
    route = MoonEP(None, 32, device=torch.device("cpu")).plan(choice).route()
    fields = {**vars(route), **vars(route.plan)}.values()
    held = sum(each.nbytes for each in fields if isinstance(each, torch.Tensor))
    assert held / 512 == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_tower_holds_what_the_plan_counts(dtype: str) -> None:
    measured, expected = saved_by_tower(TOWER, dtype, "cpu")
    assert measured == pytest.approx(expected, rel=0.01)


def test_a_region_that_runs_again_keeps_what_it_takes_and_loses_what_it_makes() -> None:
    layer = activation_bytes.decoder_layer(k3(), 1, "cuda")
    kept, again = held_bytes(layer), held_bytes(layer, {"kda.gate", "moe.combine"}.__contains__)
    channels, rows = 96 * 128, 16 * 3584
    # Output in FP32, its scales, its norm and the gate; in their place output and logits.
    assert kept["kda.gate"] == channels * (4 + 2 + 2) + 4 * 96
    assert again["kda.gate"] == channels * (2 + 2)
    assert (kept["kda.output"], again.get("kda.output")) == (2 * channels, None)
    assert again["moe.combine"] == 2 * rows + 4 * 32 + 8 * 16, "weights of 32 experts, places of 16 entries"
    # What the core saves is taken by nobody else, and stays.
    assert kept["kda.core"] == again["kda.core"]


def test_regions_in_a_row_keep_the_input_of_the_first() -> None:
    layer = activation_bytes.decoder_layer(k3(), 1, "cuda")
    chain = {"attn_res.mix", "kda.input", "kda.qkv", "kda.decay", "kda.core", "kda.gate_input", "kda.gate"}
    held = held_bytes(layer, chain.__contains__)
    assert not [site for site in held if site.startswith("kda.")]
    assert held["attn_res.mix"] == 2 * 2 * 7168, "two running sums"


def test_recompute_said_of_a_plain_site_changes_nothing() -> None:
    layer = activation_bytes.decoder_layer(k3(), 1, "cuda")
    assert held_bytes(layer, {"kda.output", "moe.experts"}.__contains__) == held_bytes(layer)


@pytest.mark.parametrize("overrides", [[], ["parallel.expert.dispatcher=moonep"], ["model.num_experts=0"]])
def test_sites_are_those_of_the_tensors(overrides: list[str]) -> None:
    config = k3("model.mtp_layers=1", "vision=moonvit_v2", *overrides)
    parts: list[list[Saved]] = [activation_bytes.decoder_layer(config, each, "cuda") for each in range(4)]
    parts += [activation_bytes.output(config, "cuda"), activation_bytes.mtp(config, "cuda")]
    tower = config.vision, "bf16"
    parts += [
        activation_bytes.tower_block(*tower, "cuda"),
        activation_bytes.tower_ends(*tower, "cuda"),
        activation_bytes.projector(config.vision, 7168, "bf16", "cuda"),
    ]
    tensors = [tensor for part in parts for tensor in part]
    known = {site.name: site for site in sites(config)}
    used = {name for tensor in tensors for name in (tensor.site, *tensor.saved_by, *tensor.taken_by)}
    used |= {tensor.made_in for tensor in tensors if tensor.made_in}
    whole = {"other", "layer", "mtp.layer", "vit.layer"}
    assert used | whole | {"kda.gate_input", "mla.gate_input", "mtp.mla.gate_input"} == known.keys()
    assert all(is_region(name) for tensor in tensors for name in tensor.taken_by)
    assert known.keys() <= {site.name for site in SITES}


def test_a_layers_regions_cost_less_than_the_layer_and_the_layer_its_flops() -> None:
    config = k3()
    for layer in range(4):
        costs = activation_costs.layer_costs(config, layer, "cuda")
        whole = costs.pop("layer")
        assert whole.flops == sum(flops.layer_flops(config.model, layer, 8192).values())
        assert 0 < sum(cost.flops for cost in costs.values()) < whole.flops
        assert 0 < sum(cost.bytes for cost in costs.values()) < whole.bytes
    # The gate takes two rows, makes one in FP32 and two for itself, which it reads again, and one for others.
    channels = 96 * 128
    gate = activation_costs.layer_costs(config, 1, "cuda")["kda.gate"]
    assert gate.bytes == channels * (2 * 2 + 2 * (4 + 2 + 2) + 2) + 2 * 4 * 96

"""Policies for a budget, against trying every set of regions; room of tiers."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from k3train.activation_ledger import SPARE, stages
from k3train.activation_plan import ACTIVATION_KINDS, _counts, tier_plan, with_budget
from k3train.activation_policy import BUDGET, policy_of
from k3train.activation_sites import sites
from k3train.config import ClusterConfig, Config, DataConfig, ModelConfig, ParallelConfig, RunConfig
from k3train.errors import UserError
from k3train.memory import rank_activations, rank_memory
from k3train.schedule import layer_cuts, pipeline_table, policy_costs, row_plan
from parallel.topology import Topology

DENSE = ModelConfig(
    num_layers=5, hidden_size=64, vocab_size=320, num_heads=2, kda_head_dim=32, q_lora_rank=32,
    kv_lora_rank=32, qk_nope_head_dim=32, qk_extra_head_dim=16, v_head_dim=32, num_experts=0,
    num_shared_experts=0, dense_ffn_size=192, mtp_layers=0,
)  # fmt: skip


def make(
    pipeline: int = 1, model: ModelConfig = DENSE, budget: float | None = None, **cluster: float
) -> Config:
    config = Config(
        run=RunConfig(microbatches=4),
        model=model,
        data=DataConfig(sequence_length=512),
        parallel=ParallelConfig(pipeline=pipeline, zero=0, data=1),
        cluster=ClusterConfig(nodes=1, ranks_per_node=pipeline, **cluster),  # type: ignore[arg-type]
    )
    config.offload.budget_gb, config.offload.min_kib, config.offload.inflight_mib = budget, 0, 1
    return config


def fullest(config: Config) -> float:
    topology = Topology(pipeline=config.parallel.pipeline)
    cuts = layer_cuts(config, topology)
    rows, table = row_plan(config, topology, cuts), pipeline_table(config, topology)
    return max(sum(held.values()) for held in rank_memory(config, topology, cuts, table, rows))


def seconds(config: Config) -> float:
    """That the policy adds to the slowest rank of a pipeline without virtual stages."""
    topology = Topology(pipeline=config.parallel.pipeline)
    cuts = layer_cuts(config, topology)
    extra = policy_costs(config, topology, cuts, row_plan(config, topology, cuts))
    return max(4 * (e.recompute + 2 * e.coding + e.waits_out + e.waits_back) for e in extra)


def with_sites(config: Config, storages: dict[str, str]) -> Config:
    return replace(config, offload=replace(config.offload, resolved=storages, budget_gb=None))


def solved(config: Config) -> Config:
    return with_budget(config, Topology(pipeline=config.parallel.pipeline))


def test_where_all_fits_all_is_kept() -> None:
    config = make(budget=1.0)
    found = solved(config)
    assert found.offload.policy == BUDGET and set(found.offload.resolved.values()) == {"keep"}
    assert config.offload.policy == "keep" and not config.offload.resolved, (
        "the caller's own is left as it is"
    )


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_the_regions_are_those_that_trying_every_set_finds(share: float) -> None:
    config = make()
    regions = [site.name for site in sites(config) if site.is_region and site.name.startswith(("kda", "ffn"))]
    kept = fullest(config)
    everything = dict.fromkeys(regions, "recompute")
    least = fullest(with_sites(config, everything))
    budget = least + share * (kept - least)
    best = min(
        seconds(tried)
        for size in range(len(regions) + 1)
        for chosen in itertools.combinations(regions, size)
        if fullest(tried := with_sites(config, dict.fromkeys(chosen, "recompute"))) <= budget
    )
    config.offload.budget_gb, config.offload.allow = budget / 1e9, ["recompute"]
    config.offload.sites = {"mla.*": "keep", "layer": "keep", "attn_res.*": "keep", "head": "keep"}
    found = solved(config)
    assert fullest(found) <= budget * 1.000001
    assert seconds(found) <= best * 1.05
    assert {each for each in found.offload.resolved.values()} <= {"keep", "recompute"}


def test_what_fits_beside_the_computation_goes_to_the_host_for_nothing() -> None:
    fast = make(budget=None, host_gbps=1000.0)
    kept = fullest(fast)
    fast.offload.budget_gb, fast.offload.allow = 0.7 * kept / 1e9, ["recompute", "host"]
    found = solved(fast)
    assert fullest(found) <= 0.7 * kept and seconds(found) == 0
    assert "host" in found.offload.resolved.values()
    slow = replace(fast, cluster=replace(fast.cluster, host_gbps=0.001))
    assert "host" not in solved(slow).offload.resolved.values()
    full = replace(fast, offload=replace(fast.offload, host_gb=0.001, allow=["host"]))
    with pytest.raises(UserError, match=r"nothing fits with host: the least is about 0\.\d\d GB"):
        solved(full)


def test_fp8_is_only_taken_when_it_is_allowed() -> None:
    config = make()
    kept = fullest(config)
    config.offload.budget_gb, config.offload.allow = 0.85 * kept / 1e9, ["fp8"]
    assert "fp8" in solved(config).offload.resolved.values()
    config.offload.allow = ["nvme", "peer"]
    with pytest.raises(UserError) as refused:
        solved(config)
    assert "offload.allow with fp8" in str(refused.value) and "\n" not in str(refused.value)
    assert "nothing fits with keep alone" in str(refused.value) and "offload.nvme_dir" in str(refused.value)


def test_the_least_that_is_named_is_enough() -> None:
    config = make(budget=0.001)
    config.offload.allow = ["host"]
    with pytest.raises(UserError, match="the least is about") as refused:
        solved(config)
    named = re.search(r"about (\d+\.\d+) GB", str(refused.value))
    assert named is not None
    config.offload.budget_gb = float(named[1])
    assert fullest(solved(config)) <= config.offload.budget_gb * 1e9


def test_what_is_said_of_a_site_stays() -> None:
    config = make()
    kept = fullest(config)
    config.offload.budget_gb = 0.8 * kept / 1e9
    config.offload.sites = {"kda.*": "keep", "ffn.activation": "recompute"}
    policy = policy_of(solved(config))
    assert str(policy.storage("kda.core")) == "keep" and policy.storage("ffn.activation").recompute


def test_early_ranks_push_to_late_ones() -> None:
    config = make(pipeline=4, model=replace(DENSE, num_layers=8), link_gbps=1000.0)
    kept = fullest(config)
    config.offload.budget_gb, config.offload.allow = 0.9 * kept / 1e9, ["peer"]
    found = solved(config)
    assert "peer" in found.offload.resolved.values() and fullest(found) <= 0.9 * kept * 1.000001
    apart = replace(config, cluster=replace(config.cluster, nodes=2, ranks_per_node=2))
    with pytest.raises(UserError, match="nothing fits with keep alone"):
        solved(apart)
    plans = tier_plan(found, Topology(pipeline=4))
    assert [plan.lender for plan in plans] == [3, 2, None, None]
    assert [plan.lends for plan in plans] == [0, 0, plans[1].capacities["peer"], plans[0].capacities["peer"]]


def test_tiers_have_room_for_what_is_planned_or_what_is_given() -> None:
    config = with_sites(make(pipeline=2), {"*": "host"})
    topology = Topology(pipeline=2)
    cuts = layer_cuts(config, topology)
    held = rank_activations(
        config, pipeline_table(config, topology), stages(config, cuts, row_plan(config, topology, cuts))
    )
    for plan, rank in zip(tier_plan(config, topology), held, strict=True):
        assert plan.capacities["host"] == int(rank.tiers["host"] * SPARE + (64 << 20))
        assert plan.lender is None and plan.lends == 0
    config.offload.host_gb = 2.0
    assert {plan.capacities["host"] for plan in tier_plan(config, topology)} == {2_000_000_000}


def test_the_worst_moments_of_a_rank() -> None:
    table = pipeline_table(make(pipeline=4, model=replace(DENSE, num_layers=8)), Topology(pipeline=4))
    assert [_counts(table, rank) for rank in range(4)] == [[(4,)], [(3,)], [(2,)], [(1,)]]
    assert "activations" in ACTIVATION_KINDS

"""What a policy leaves where, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3train import activation_bytes, activation_ledger
from k3train.activation_ledger import (
    FP8_BYTES,
    SPARE,
    as_measured,
    places,
    recomputed,
    series,
    with_capacities,
)
from k3train.activation_policy import lender, policy_of, policy_of_rank
from k3train.activation_sites import held_bytes
from k3train.config import ClusterConfig, Config, DataConfig, ModelConfig, ParallelConfig, RunConfig
from k3train.memory import rank_activations, rank_memory
from k3train.schedule import layer_cuts, pipeline_table, row_plan
from offload.fp8 import encoded_nbytes
from offload.policy import Policy
from parallel.pipeline.table import BACKWARD, FORWARD
from parallel.topology import Topology

MODEL = ModelConfig(vocab_size=4096, mtp_layers=0)
ROW = 256 * 256 * 4


def make(model: ModelConfig = MODEL, pipeline: int = 1, virtual: int = 1, **sites: str) -> Config:
    config = Config(
        run=RunConfig(microbatches=4),
        model=model,
        data=DataConfig(sequence_length=256),
        parallel=ParallelConfig(pipeline=pipeline, virtual=virtual, zero=0, data=1),
        cluster=ClusterConfig(nodes=1),
    )
    config.offload.sites = {name.replace("__", "."): text for name, text in sites.items()}
    config.offload.min_kib = 0
    return config


def stages(config: Config) -> list[activation_ledger.Stage]:
    topology = Topology(pipeline=config.parallel.pipeline, virtual=config.parallel.virtual)
    cuts = layer_cuts(config, topology)
    return activation_ledger.stages(config, cuts, row_plan(config, topology, cuts))


def held(config: Config, stage: int = 0) -> dict[str, float]:
    policy = policy_of(config)
    sizes = stages(config)[stage].sizes(recomputed(policy), config.offload.min_kib << 10)
    return {name: size for name, size in places(sizes, policy, 4).items() if size}


def everything(config: Config) -> float:
    parts = [activation_bytes.decoder_layer(config, layer, "cpu") for layer in range(9)]
    parts.append(activation_bytes.output(config, "cpu"))
    return 256 * sum(sum(held_bytes(tensors).values()) for tensors in parts)


def test_all_of_it_is_somewhere() -> None:
    whole = everything(make())
    kept, host = held(make()), held(with_star("host"))
    assert sum(kept.values()) == pytest.approx(whole) and set(kept) == {"device", "alone"}
    assert set(host) == {"host", "alone"} and host["alone"] == kept["alone"]
    assert host["host"] == pytest.approx(kept["device"])


def with_star(storage: str) -> Config:
    config = make()
    config.offload.sites = {"*": storage}
    return config


def test_fp8_codes_the_model_s_dtype_alone() -> None:
    assert pytest.approx(encoded_nbytes(1 << 22) / (1 << 22)) == FP8_BYTES
    sizes = stages(make())[0].sizes(lambda _: False, 0)
    model, exact = (sum(getattr(size, kind) for size in sizes.values()) for kind in ("model", "exact"))
    found = held(with_star("fp8"))
    assert found["fp8"] == pytest.approx(model / 4 * FP8_BYTES)
    assert found["device"] == pytest.approx(exact)
    assert held(with_star("fp8+host"))["host"] == pytest.approx(model / 4 * FP8_BYTES + exact)


def test_small_tensors_are_left_alone() -> None:
    config = make()
    config.offload.min_kib = 1 << 20
    assert set(held(config)) == {"alone"}
    config.offload.min_kib = 64
    assert 0 < held(config)["alone"] < 0.05 * everything(config)


def test_layers_that_are_run_again_together_leave_what_enters_them() -> None:
    one = held(make(layer="recompute"))["device"]
    config = make(layer="recompute")
    config.offload.recompute_layers = 3
    # Layers 0, 3 and 6 are first; 4 and 8 begin a block inside a group, and their rows stay.
    assert one - held(config)["device"] == pytest.approx((9 - 5) * ROW)
    assert stages(config)[0].workspace(lambda _: True) > stages(make(layer="recompute"))[0].workspace(
        lambda _: True
    )


def test_a_region_that_is_run_again_leaves_its_inputs() -> None:
    sizes = stages(make())[0].sizes(lambda _: False, 0)
    again = stages(make())[0].sizes(lambda site: site == "ffn.activation", 0)
    # Layer 0 is dense: gate and up stay, what is made of them goes.
    assert again["ffn.activation"].whole == sizes["ffn.activation"].whole == 256 * 2 * 1056 * 4
    assert "ffn.output" in sizes and "ffn.output" not in again


def test_a_pattern_over_plain_sites_runs_none_of_them_again() -> None:
    config = make()
    config.offload.sites = {"kda.*": "recompute"}
    policy = policy_of(config)
    assert recomputed(policy)("kda.qkv") and not recomputed(policy)("kda.output")


def test_a_message_with_rows_belongs_to_the_bank() -> None:
    config = make(pipeline=2)
    first, second = (
        {name: size.whole for name, size in stage.sizes(lambda _: False, 0).items()}
        for stage in stages(config)
    )
    # Layers 0 and 4 begin blocks in the first stage, 8 in the second, which two rows and the sum come into.
    assert first["attn_res.bank"] == 2 * ROW and second["attn_res.bank"] == (3 + 1) * ROW


def test_series_rise_with_forwards_and_end_at_nothing() -> None:
    config = make(pipeline=2)
    topology = Topology(pipeline=2)
    table = pipeline_table(config, topology)
    sizes = [{"device": 3.0, "host": 5.0}, {"device": 1.0}]
    for rank in range(2):
        marks = series(table, rank, sizes)
        assert len(marks) == len(table.ranks[rank])
        assert set(marks[-1].values()) == {0}
        most = max(mark["device"] for mark in marks)
        assert most == (2 * 3.0, 1.0)[rank], "1F1B holds two micro-batches on the first rank, one on the last"
    kinds = [op.kind for op in table.ranks[0]]
    assert kinds[:2] == [FORWARD, FORWARD] and BACKWARD in kinds
    assert as_measured({"device": 1.0, "bank": 2.0, "host": 9.0}, window=4.0) == {"device": 7.0, "host": 9.0}


def test_what_has_no_room_goes_on() -> None:
    full = with_capacities({"nvme": 10.0, "host": 2.0, "device": 1.0}, {"nvme": 4.0, "host": 5.0})
    assert dict(full) == {"nvme": 4.0, "host": 5.0, "device": 4.0, "peer": 0.0}


def test_early_ranks_borrow_from_late_ones() -> None:
    assert [lender(rank, 4) for rank in range(4)] == [3, 2, None, None]
    assert [lender(rank, 3) for rank in range(3)] == [2, None, None] and lender(0, 1) is None
    config = make(pipeline=2)
    config.offload.sites, config.offload.resolved = {"kda.*": "fp8+peer"}, {"*": "peer"}
    assert policy_of_rank(config, 0) == policy_of(config)
    assert policy_of_rank(config, 1) == Policy.read({"*": "keep"}, {"kda.*": "fp8"})


def test_a_lender_counts_what_it_lends_and_a_borrower_does_not() -> None:
    config = make(pipeline=2)
    config.offload.sites = {"*": "peer"}
    topology = Topology(pipeline=2)
    cuts = layer_cuts(config, topology)
    rows, table = row_plan(config, topology, cuts), pipeline_table(config, topology)
    first, last = rank_activations(config, table, stages(config))
    assert first.tiers["peer"] > 0 and not last.tiers
    assert last.device["lent_to_peers"] == pytest.approx(SPARE * first.tiers["peer"], rel=1e-6)
    config.offload.inflight_mib = 1
    kept = replace(config, offload=replace(config.offload, sites={}))
    before = rank_memory(kept, topology, cuts, table, rows)
    after = rank_memory(config, topology, cuts, table, rows)
    assert sum(after[0].values()) < sum(before[0].values()) - 2**25
    assert after[1]["activations"] == before[1]["activations"]
    given = replace(config, offload=replace(config.offload, peer_gb=0.001))
    small, lends = rank_activations(given, table, stages(given))
    assert small.tiers["peer"] == 1_000_000 and lends.device["lent_to_peers"] == 1_000_000
    assert small.tiers["host"] == pytest.approx(first.tiers["peer"] - 1_000_000, abs=2)

"""Traffic and memory of expert parallelism from the configuration: against counts of drawn experts."""

import random
from dataclasses import replace

import pytest

from k3train.config import ClusterConfig, Config, ExpertConfig, ModelConfig, ParallelConfig
from k3train.expert_plan import (
    assumptions,
    combine_row_bytes,
    dispatch_row_bytes,
    entry_rows,
    layer_traffic,
    payload_rows,
    slot_bytes,
    staging_bytes,
)
from parallel.topology import Topology

MODEL = ModelConfig(num_experts=64, top_k=8, latent_size=16, expert_ffn_size=8, dtype="bfloat16")


def config(model: ModelConfig = MODEL, **experts: object) -> Config:
    return Config(model=model, parallel=ParallelConfig(expert=ExpertConfig(**experts)))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_a_token_sends_one_row_to_each_rank_that_it_meets(ranks: int) -> None:
    draw, places, met, entries = random.Random(0), 64 // ranks, 0, 0
    for _ in range(4000):
        homes = [expert // places for expert in draw.sample(range(64), 8)]
        met += len({home for home in homes if home})
        entries += sum(home > 0 for home in homes)
    assert payload_rows(MODEL, ranks) == pytest.approx(met / 4000, rel=0.02, abs=1e-12)
    assert entry_rows(MODEL, ranks) == pytest.approx(entries / 4000, rel=0.02, abs=1e-12)


def test_published_figures_of_de_duplication() -> None:
    """Rows of a token with 16 of 896 experts: 6.2, 9.7, 12.4, 14.2 at 8, 16, 32, 64 ranks."""
    model = replace(MODEL, num_experts=896, top_k=16)
    rows = [payload_rows(model, ranks) for ranks in (8, 16, 32, 64)]
    assert rows == pytest.approx([6.2, 9.7, 12.4, 14.2], abs=0.07)


def test_moonep_sends_fewer_rows_and_sends_them_again() -> None:
    plain, balanced = (config(size=8, dispatcher=name) for name in ("alltoall", "moonep"))
    layout = Topology(expert=8, data=8)
    assert dispatch_row_bytes(plain, layout) == 8 * 7 / 8 * 16 * 2
    assert dispatch_row_bytes(balanced, layout) < dispatch_row_bytes(plain, layout)
    # Sums travel in FP32 only where that is less than the entries in BF16.
    assert combine_row_bytes(balanced, layout) == dispatch_row_bytes(plain, layout)
    wide = replace(balanced, model=replace(MODEL, dtype="float32"))
    assert combine_row_bytes(wide, layout) == dispatch_row_bytes(wide, layout)
    sent = layer_traffic(balanced, layout, 10)
    one_expert = 3 * 16 * 8 * 2
    assert sent["expert_weights"] == 2 * one_expert and sent["expert_weight_gradients"] == one_expert
    scalars = 4 * 8 * 7 / 8
    assert sent["expert_dispatch"] == pytest.approx(10 * (3 * dispatch_row_bytes(balanced, layout) + scalars))


def test_slots_bound_what_is_borrowed() -> None:
    layout = Topology(expert=8, data=8)
    assert slot_bytes(config(size=8), layout) == 0
    assert slot_bytes(config(size=8, dispatcher="moonep"), layout) == 2 * 8 * 3 * 16 * 8 * 2
    assert slot_bytes(config(size=8, dispatcher="moonep", slots=2), layout) == 2 * 2 * 3 * 16 * 8 * 2
    assert slot_bytes(config(dispatcher="moonep"), Topology()) == 0


def test_the_plan_says_how_many_experts_it_lets_a_rank_borrow() -> None:
    layout = Topology(expert=8, data=8)
    (line,) = assumptions(config(size=8, dispatcher="moonep"), layout)
    assert "weights of 1 expert in each layer, and up to 8" in line
    (line,) = assumptions(config(size=8, dispatcher="moonep", policy="eplb", eplb_copies=3), layout)
    assert line.endswith("of 3 experts in each layer")
    for other in ({}, {"dispatcher": "moonep", "policy": "none"}):
        assert assumptions(config(size=8, **other), layout) == []
    assert assumptions(config(dispatcher="moonep"), Topology()) == []


@pytest.mark.parametrize(("policy", "borrowed"), [("none", 0), ("eplb", 3)])
def test_other_policies_borrow_what_they_place(policy: str, borrowed: int) -> None:
    layout, one_expert = Topology(expert=8, data=8), 3 * 16 * 8 * 2
    held = config(size=8, dispatcher="moonep", policy=policy, eplb_copies=3)
    assert slot_bytes(held, layout) == 2 * borrowed * one_expert
    sent = layer_traffic(held, layout, 10)
    assert sent["expert_weight_gradients"] == borrowed * one_expert


def test_peer_memory_is_staged_within_a_host() -> None:
    layout = Topology(expert=8, data=8)
    held = config(size=8, dispatcher="moonep")
    held.cluster = ClusterConfig(gpu="h200", ranks_per_node=8)
    assert staging_bytes(held, layout) == 2 * 128 * 2**20
    held.cluster.ranks_per_node = 4
    assert staging_bytes(held, layout) == 0
    assert staging_bytes(config(size=8, dispatcher="moonep"), layout) == 0

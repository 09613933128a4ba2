"""ZeRO-2's ledger. Letters: N elements of a rank's chunks, d data ranks, v chunks of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from k3train import shapes
from k3train.config import Config, ExpertConfig, ModelConfig, OffloadConfig, ParallelConfig, RunConfig
from k3train.gradient_plan import equal_chunks, rank_gradients
from k3train.layout import layout_of
from k3train.memory import gradient_warning
from k3train.plan import facts, plan
from k3train.schedule import simulation
from k3train.shapes import Parameter
from parallel.pipeline.table import REDUCE
from parallel.topology import Topology

MODEL = ModelConfig(vocab_size=4096, num_layers=8, mtp_layers=0)


def config(expert: int = 1, **parallel: Any) -> Config:
    return Config(
        run=RunConfig(microbatches=8),
        model=MODEL,
        parallel=ParallelConfig(zero=2, expert=ExpertConfig(size=expert), **parallel),
    )


def entry(numel: int, kind: str = "mlp") -> Parameter:
    whole = next(each for each in shapes.compact_parameters(MODEL) if each.trainable)
    return replace(whole, name=f"{kind}.{numel}", shape=(numel,), kind=kind)


def test_shards_and_two_slots() -> None:
    chunks = [[entry(100)], [entry(60), entry(40, "expert")], [entry(90)]]
    held = rank_gradients(Topology(data=4, expert=2, virtual=3), chunks)
    # Experts: half of them on this rank, each on two ranks.
    assert held.whole == 4 * (100 + 60 + 20 + 90)
    assert held.shards == 4 * (25 + 15 + 10 + 23)
    assert held.slots == 2 * 4 * 100
    assert held.on_device("device") == held.shards + held.slots
    assert held.on_device("host") == held.on_device("nvme") == held.slots
    assert rank_gradients(Topology(data=4), [[entry(100)]]).slots == 4 * 100


@pytest.mark.parametrize(
    ("data", "virtual", "device", "host"),
    [(4, 2, 1.25, 1.0), (4, 3, 0.25 + 2 / 3, 2 / 3), (2, 4, 1.0, 0.5), (8, 8, 0.375, 0.25), (2, 1, 1.5, 1.0)],
)
def test_when_equal_chunks_pay(data: int, virtual: int, device: float, host: float) -> None:
    found = equal_chunks(Topology(data=data, virtual=virtual))
    assert found == {"device": pytest.approx(device), "host": pytest.approx(host)}


def test_the_plan_has_the_ledger_the_sums_and_the_traffic() -> None:
    asked = config(pipeline=2, virtual=4, data=4)
    planned = plan(asked, 8)
    whole = plan(replace(asked, parallel=replace(asked.parallel, zero=1)), 8)
    for held, before in zip(planned["memory_bytes"], whole["memory_bytes"], strict=True):
        assert held["gradients"] == pytest.approx(before["gradients"] / 4, rel=1e-3)
        assert held["gradient_slots"] > 0 and "gradient_slots" not in before
        assert held["optimizer_states"] == before["optimizer_states"]
    found = planned["gradients"]
    assert found["zero1_bytes"] == max(held["gradients"] for held in whole["memory_bytes"])
    assert found["zero2_bytes"] == max(h["gradients"] + h["gradient_slots"] for h in planned["memory_bytes"])
    sent, once = planned["traffic_bytes"], whole["traffic_bytes"]
    assert sent["gradient_reduce_scatter"] == pytest.approx(4 * once["gradient_reduce_scatter"])
    assert sent["parameter_all_gather"] == once["parameter_all_gather"]
    table = simulation(asked, layout_of(asked, 8)).timeline.table
    assert [sum(op.kind == REDUCE for op in ops) for ops in table.ranks] == [4 * 4, 4 * 4]


def test_a_larger_group_sums_less_often() -> None:
    asked = config(pipeline=2, virtual=4, data=4, microbatch_group=4)
    once = plan(replace(asked, parallel=replace(asked.parallel, zero=1)), 8)["traffic_bytes"]
    sent = plan(asked, 8)["traffic_bytes"]
    assert sent["gradient_reduce_scatter"] == pytest.approx(2 * once["gradient_reduce_scatter"])


def test_states_off_the_device_leave_two_windows() -> None:
    asked = config(pipeline=2, virtual=4, data=4)
    asked.offload = OffloadConfig(gradients="host", optimizer="nvme", nvme_dir="disk", window_mib=1)
    for held in plan(asked, 8)["memory_bytes"]:
        assert held["gradients"] == held["optimizer_states"] == held["master_weights"] == 0
        assert held["optimizer_windows"] == 2 << 20


def test_a_warning_where_it_costs_more() -> None:
    asked = config(pipeline=2, virtual=2, data=4)
    warning = gradient_warning(asked, layout_of(asked, 8))
    assert warning is not None and "else use parallel.zero=1 or offload.gradients=host" in warning
    planned = plan(asked, 8)
    assert planned["gradients"]["warning"] == warning == facts(planned)["warning"]
    assert "1/DP + 2/V is 1.25" in facts(planned)["ZeRO-2"]
    first = replace(asked, parallel=replace(asked.parallel, zero=1))
    assert gradient_warning(first, layout_of(first, 8)) is None
    asked = config(pipeline=1, virtual=8, data=8)
    assert gradient_warning(asked, layout_of(asked, 8)) is None
    assert "warning" not in facts(plan(asked, 8))

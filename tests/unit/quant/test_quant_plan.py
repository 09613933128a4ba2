"""What the plan counts of quantised experts."""

from __future__ import annotations

import pytest

from k3train.config import Config
from k3train.expert_plan import pass_traffic
from k3train.quant_plan import rounded_bytes, travel_share
from k3train.shapes import compact_parameters
from launch.compose import ready
from parallel.topology import Topology

MOONEP = ["parallel=ep2", "parallel.expert.dispatcher=moonep"]
QAT = ["quant=mxfp4_qat"]
# Routed experts of `tiny`, FP32: eight MoE layers and MTP's.
LAYER = 32 * 3 * 128 * 96 * 4
ALL = 9 * LAYER


def tiny(*overrides: str) -> Config:
    return ready(["recipe=tiny", "parallel=single", "vision=none", *overrides], inputs=False)


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [
        ([], 1, 0),
        (QAT, 1, ALL),
        ([*QAT, "quant.hold_weights=false"], 1, LAYER),
        ([*QAT, "parallel=ep2"], 2, ALL / 2),
        ([*QAT, *MOONEP], 2, ALL / 2 * (1 + 4.25 / 32)),
        ([*QAT, *MOONEP, "quant.hold_weights=false"], 2, LAYER / 2 * (1 + 4.25 / 32)),
    ],
)
def test_rounded_copies(overrides: list[str], ranks: int, expected: float) -> None:
    config = tiny(*overrides)
    assert config.parallel.data is not None
    topology = Topology(1, 1, config.parallel.expert.size, 1, config.parallel.data)
    assert topology.expert == ranks
    assert rounded_bytes(config, topology, list(compact_parameters(config.model))) == expected


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], 1.0),
        (QAT, 4.25 / 32),
        ([*QAT, "model.dtype=bfloat16"], 4.25 / 16),
        ([*QAT, "model.dtype=bfloat16", "quant.weight_format=mxfp8_e4m3"], 8.25 / 16),
    ],
)
def test_borrowed_experts_travel_packed_and_their_gradients_do_not(
    overrides: list[str], share: float
) -> None:
    config = tiny(*MOONEP, *overrides)
    assert travel_share(config) == share
    for sent in pass_traffic(config, Topology(1, 1, 2, 1, 2), 1024):
        backward = pass_traffic(config, Topology(1, 1, 2, 1, 2), 1024)[1]
        assert sent["expert_weights"] == share * backward["expert_weight_gradients"] > 0

"""Balanced experts on one rank: against a dense layer, in FP64."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from parallel.moonep import MoonEP
from tests.dist.moonep_worker import (
    FFN,
    LATENT,
    TOP_K,
    Data,
    LoopMath,
    balanced,
    dense,
    differences,
    digest,
    through_dispatcher,
)

ROUNDING = 1e-12
CPU = torch.device("cpu")


@pytest.mark.parametrize("way", ["lean", "dispatcher", "checkpoint", "checkpoint_again"])
@pytest.mark.parametrize("routing", ["random", "skewed", "duplicates", "one_expert"])
def test_equals_a_dense_layer(way: str, routing: str) -> None:
    data, math = Data([13], routing), LoopMath()
    found = balanced(data, 0, MoonEP(None, data.experts, device=CPU), math, way)
    assert max(differences(found, dense(data)[0]).values()) < ROUNDING
    assert set(math.first_rows) == {13 * 3}


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("way", ["lean", "dispatcher"])
def test_no_token_and_one_token(tokens: int, way: str) -> None:
    data = Data([tokens], "random")
    found = balanced(data, 0, MoonEP(None, data.experts, device=CPU), LoopMath(), way)
    assert max(differences(found, dense(data)[0]).values()) < ROUNDING


@pytest.mark.parametrize(
    "options", [{"pad": 4}, {"combine": "entries"}, {"combine": "sums"}, {"recompute_gate_up": True}]
)
def test_options_change_no_value(options: dict[str, object]) -> None:
    data, math = Data([11], "skewed"), LoopMath()
    found = balanced(data, 0, MoonEP(None, data.experts, device=CPU, **options), math, "lean")  # type: ignore[arg-type]
    assert max(differences(found, dense(data)[0]).values()) < ROUNDING
    assert len(math.first_rows) == (2 if "recompute_gate_up" in options else 1)
    assert math.first_rows[0] % 4 == 0 if "pad" in options else math.first_rows[0] == 33


def test_both_ways_back_round_alike_in_bfloat16() -> None:
    """On one rank the order of addition is the same too."""
    data = Data([9], "skewed", torch.bfloat16)
    sums, entries = (
        balanced(data, 0, MoonEP(None, data.experts, device=CPU, combine=way), LoopMath(), "lean")
        for way in ("sums", "entries")
    )
    assert digest(sums, list(sums)) == digest(entries, list(entries))
    assert sums["output"].dtype == sums["latent"].dtype == sums["w1"][0].dtype == torch.bfloat16
    assert sums["weights"].dtype == torch.float32
    apart = differences(sums, dense(data.wide())[0])
    assert 0 < max(apart.values()) < 0.03


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept_for_backward(recompute: bool) -> None:
    data, math = Data([7], "random"), LoopMath()
    moonep = MoonEP(None, data.experts, device=CPU, recompute_gate_up=recompute)
    latent, weights = data.latent[0].requires_grad_(), data.weights[0].requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        moonep(latent, weights, moonep.plan(data.choice[0]), math, data.w1, data.w2)
    rows = 7 * TOP_K
    own = [tuple(each.shape) for each in (*data.w1, *data.w2)]
    gate_up = [] if recompute else [(rows, 2 * FFN)]
    assert [tuple(each.shape) for each in kept] == [(7, LATENT), (rows,), *own, *gate_up]
    assert kept[0] is latent or kept[0].data_ptr() == latent.data_ptr()


def test_transfers_started_ahead_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that came are rebuilt in backward: forward must not hold the buffer they came in."""
    data, buffers = Data([11], "random"), []
    moonep = MoonEP(None, data.experts, device=CPU)
    exchange = moonep.transport.exchange

    def watched(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (into := kwargs.get("into")) is not None:
            buffers.append(weakref.ref(into._base))
        return exchange(rows, *args, **kwargs)

    monkeypatch.setattr(moonep.transport, "exchange", watched)
    latent, weights = data.latent[0].requires_grad_(), data.weights[0].requires_grad_()
    routed = moonep.plan(data.choice[0])
    moonep.send(latent, routed, data.w1, data.w2)
    output = moonep(latent, weights, routed, LoopMath(), data.w1, data.w2)
    assert len(buffers) == 1 and buffers[0]() is None
    assert torch.equal(output.detach(), balanced(data, 0, moonep, LoopMath(), "lean")["output"])


def test_the_dispatcher_reads_a_routing_map() -> None:
    data = Data([8], "random")
    choice, weights = data.choice[0].sort(-1)[0], data.weights[0]
    probs = torch.zeros(8, data.experts, dtype=torch.float64).scatter(1, choice, weights)
    routing_map = probs > 0
    moonep, math = MoonEP(None, data.experts, device=CPU), LoopMath()
    by_choice, by_map = (
        through_dispatcher(moonep, data.latent[0], given, where, math, data.w1, data.w2)
        for given, where in ((weights, choice), (probs, routing_map))
    )
    assert torch.equal(by_choice, by_map)


def test_the_way_back_moves_fewer_bytes() -> None:
    """FP32 sums of 7.06 payloads against 16 BF16 entries at eight ranks; at sixteen, 10.3 against 16."""
    moonep = MoonEP(None, 16, device=CPU)
    found = []
    for ranks in (8, 16):
        moonep.transport.ranks = ranks
        found.append(moonep._sums(torch.bfloat16, 16))
    assert found == [True, False]
    assert moonep._sums(torch.float32, 16)


def test_stats_begin_anew_when_read() -> None:
    data = Data([5], "random")
    moonep = MoonEP(None, data.experts, device=CPU, pad=8)
    assert moonep.stats.read() == {}
    for _ in range(2):
        balanced(data, 0, moonep, LoopMath(), "lean")
    assert moonep.stats.calls == 2
    found = moonep.stats.read()
    assert found["max_over_mean_before"] == found["max_over_mean_after"] == found["waves_mean"] == 1.0
    assert found["prefetch_bytes"] == found["rows_sent"] == found["moved_share"] == 0.0
    assert found["padding_share"] > 0
    assert found["plan_ms"] > 0
    assert moonep.stats.read() == {}

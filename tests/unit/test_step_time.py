"""Step time from the hardware entry and from a calibration, and the fast path beside the simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3train import calibration
from k3train.errors import UserError
from k3train.log.plan_page import ledger, waterfall
from k3train.operators import Operators
from k3train.step_time import estimate, predict
from k3train.weight_sums import rank_sums
from launch.compose import ready
from parallel.topology import Topology

TINY = ["recipe=tiny", "vision=none", "data.images=[]"]


def config_of(*overrides: str, recipe: str = "recipe=k3_pretrain"):
    return ready([recipe, *overrides], inputs=False)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["offload.policy=keep"],
        ["parallel.zero=2"],
        ["run.microbatches=32"],
        ["parallel.pipeline=16", "parallel.virtual=1", "parallel.layers_per_chunk=null", "cluster.nodes=256"],
        ["cluster=gb200", "cluster.nodes=256"],
    ],
)
def test_the_fast_path_is_near_the_simulation(overrides: list[str]) -> None:
    config = config_of(*overrides)
    slow, fast = predict(config), estimate(config)
    assert fast.seconds == pytest.approx(slow.seconds, rel=0.03)
    assert sum(slow.parts.values()) == pytest.approx(slow.seconds)
    assert sum(fast.parts.values()) == pytest.approx(fast.seconds)
    assert fast.parts["grouped_gemm"] == pytest.approx(slow.parts["grouped_gemm"])


def test_h200_slice_takes_about_what_it_took() -> None:
    # One H200, benchmarks.md: 4.05 s with Muon and recompute, of which the update takes 1.39.
    found = predict(config_of(recipe="recipe=h200_slice"))
    assert found.seconds == pytest.approx(4.05, rel=0.1)
    assert found.parts["newton_schulz"] + found.parts["optimizer"] == pytest.approx(1.4, rel=0.1)


def test_each_class_follows_its_own_share() -> None:
    usual = predict(config_of())
    fast = predict(config_of("cluster.efficiency.kda_core=0.074"))
    assert fast.parts["kda_core"] == pytest.approx(usual.parts["kda_core"] / 2)
    assert fast.parts["attention"] == pytest.approx(usual.parts["attention"])
    assert fast.seconds < usual.seconds


def test_links_that_join_racks_shorten_the_exchange() -> None:
    apart = predict(config_of("cluster.link_domain=8"))
    joined = predict(config_of("cluster.link_domain=128"))
    assert joined.parts["expert_exchange"] < apart.parts["expert_exchange"] / 3
    assert "links" in joined.exposed["expert_exchange"][1]
    assert "network" in apart.exposed["expert_exchange"][1]


def calibrated(tmp_path: Path, *overrides: str, **cluster: float) -> str:
    config = ready([*TINY, *overrides], inputs=False)
    layers = {kind: {"5": [0.01, 0.03]} for kind in ("kda+dense", "kda+moe", "mla+moe")}
    ((dense, experts),) = rank_sums(config, Topology(), [range(config.model.num_layers)])
    update = {"seconds": 0.7, "dense": vars(dense), "experts": vars(experts)}
    shape = {"layers": layers, "output": [0.02, 0.04], "optimizer": update, "step": 0.5}
    content = {
        "schema": 2,
        "cluster": cluster,
        "measured": {"shapes": {calibration.shape_key(config): {"1": shape}}, "collectives": {}},
    }
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(content))
    return f"cluster.calibration={file}"


def test_a_calibration_of_the_shapes_gives_their_times(tmp_path: Path) -> None:
    overrides = ["parallel=single"]
    figures = {
        "efficiency.memory": 0.3,
        "efficiency.newton_schulz": 0.2,
    }  # of the cluster, other than the entry's
    config = ready([*TINY, *overrides, calibrated(tmp_path, *overrides, **figures)], inputs=False)
    found = predict(config)
    operators = Operators(config)
    assert sum(operators.layer(1).forward.values()) == pytest.approx(0.01)
    microbatch = 9 * 0.04 + 0.06
    assert found.parts["optimizer"] + found.parts["newton_schulz"] == pytest.approx(0.7)
    assert found.seconds == pytest.approx(4 * microbatch + 0.7 + 0.5)
    assert "measured" in calibration.assumption(config)


def test_other_shapes_take_the_measured_shares(tmp_path: Path) -> None:
    option = calibrated(tmp_path, "parallel=single", **{"efficiency.attention": 0.123, "link_gbps": 7.0})
    config = ready([*TINY, "parallel=single", "data.sequence_length=128", option], inputs=False)
    assert (config.cluster.efficiency.attention, config.cluster.link_gbps) == (0.123, 7.0)
    assert Operators(config).measured is None
    assert "other shapes" in calibration.assumption(config)
    given = ready([*TINY, "parallel=single", option, "cluster.link_gbps=3"], inputs=False)
    assert given.cluster.link_gbps == 3.0


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "is not JSON"), ("{}", "no calibration of schema 2"), (None, "cannot be read")],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=told):
        ready([*TINY, f"cluster.calibration={file}"], inputs=False)


def test_bars_of_the_page_add_up() -> None:
    bars = waterfall([("a", 3.0, "<why>"), ("b", 1.0, "")])
    assert "left:75.000%;width:25.000%" in bars and "&lt;why&gt;" in bars
    held = ledger([{"x": 2, "y": 2}, {"x": 2, "y": 2}, {"x": 4, "y": 0}], 8)
    assert "ranks 0 to 1" in held and "rank 2" in held and "left:25.000%;width:25.000%" in held

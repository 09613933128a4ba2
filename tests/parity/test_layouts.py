"""One rank against every layout: losses, first gradients, and weights after five optimizer steps.

A pipeline with one chunk on a rank changes no order of summation: bitwise. With virtual stages the gradients
of a kept AttnRes row are summed rank by rank; data and expert parallelism sum over ranks and group rows
differently, and recompute adds gradients in another order: a bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.launch import run_workers

Run = tuple[list[dict[str, Any]], dict[str, dict[str, list[Tensor]]]]

UNEVEN = "parallel.layers_per_chunk=[1,3,1,1]"
PP2_VPP2 = ["parallel.pipeline=2", "parallel.virtual=2", UNEVEN]
MOONEP2 = ["parallel.expert.size=2", "run.microbatches=2", "parallel.expert.dispatcher=moonep"]
BOUNDED = {
    "pp2_vpp2": (2, [*PP2_VPP2, "parallel.zero=0"]),
    # A layer's two reads of a bank row are added up before they meet the later layers' gradients.
    "recompute": (1, ["offload.policy=recompute", "parallel.zero=0"]),
    "dp2": (2, ["parallel.data=2", "run.microbatches=2"]),
    "dp2_zero0": (2, ["parallel.data=2", "run.microbatches=2", "parallel.zero=0"]),
    "dp2_vpp3_zero2": (
        2,
        ["parallel.data=2", "parallel.virtual=3", "run.microbatches=2", "parallel.zero=2"],
    ),
    "ep2": (2, ["parallel.expert.size=2", "run.microbatches=2", "parallel.zero=0"]),
    "moonep": (1, ["parallel.expert.dispatcher=moonep", "parallel.zero=0"]),
    "moonep_ep2": (2, [*MOONEP2, "parallel.zero=0"]),
    "moonep_ep2_eplb": (2, [*MOONEP2, "parallel.expert.policy=eplb", "parallel.expert.eplb_every=1"]),
    "moonep_ep2_pp2_vpp2_recompute_waves": (
        4,
        [*MOONEP2, *PP2_VPP2, "parallel.zero=0", "offload.policy=recompute", "parallel.expert.slots=1"],
    ),
    "cp2": (2, ["parallel.context=2", "parallel.zero=0"]),
    "cp2_recompute": (2, ["parallel.context=2", "parallel.zero=0", "offload.policy=recompute"]),
    "cp4_ep2_zero2": (4, ["parallel.context=4", "parallel.expert.size=2", "parallel.zero=2"]),
    "cp2_pp2_vpp2_zero2": (4, ["parallel.context=2", *PP2_VPP2, "parallel.zero=2"]),
    "cp2_dp2_moonep_ep4": (
        4,
        [
            "parallel.context=2",
            "parallel.data=2",
            "run.microbatches=2",
            "parallel.expert.size=4",
            "parallel.expert.dispatcher=moonep",
        ],
    ),
    "ep2_pp2": (4, ["parallel.expert.size=2", "parallel.pipeline=2", "run.microbatches=2"]),
}
LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND, MUON_BOUND = 2e-6, 1e-5, 5e-4, 1e-4
TIE_BOUND, TIED_TOKENS = 1e-4, 2


def run(world_size: int, overrides: list[str], folder: Path, via: str = "") -> Run:
    """Reports of a run, and every tensor that any rank holds by its global name."""
    if torch.cuda.is_available() and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    folder.mkdir()
    args = {"overrides": overrides, "folder": str(folder), "via": via}
    reports = run_workers("tests.parity.worker:train", world_size, args=args)
    assert all(report == reports[0] for report in reports), "ranks disagree about the step"
    tensors: dict[str, dict[str, list[Tensor]]] = {"gradients": {}, "weights": {}}
    for rank in range(world_size):
        for kind, values in torch.load(folder / f"{rank}.pt").items():
            for name, value in values.items():
                tensors[kind].setdefault(name, []).append(value)
    return reports[0], tensors


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(1, [], tmp_path_factory.mktemp("parity") / "single")


@pytest.fixture(scope="module", params=["muon", "muon_per_head"])
def single_muon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    """Override of the optimizer, and its run on one rank."""
    override = f"optim={request.param}"
    return override, run(1, [override], tmp_path_factory.mktemp("parity") / "single_muon")


def assert_bitwise(run: Run, single: Run) -> None:
    assert run[0] == single[0]
    for kind in ("gradients", "weights"):
        assert run[1][kind].keys() == single[1][kind].keys()
        for name, copies in run[1][kind].items():
            assert all(torch.equal(copy, single[1][kind][name][0]) for copy in copies), (kind, name)


def test_a_pipeline_changes_no_bit(single: Run, tmp_path: Path) -> None:
    assert_bitwise(run(2, ["parallel.pipeline=2"], tmp_path / "run"), single)


def test_muon_under_a_pipeline_changes_no_bit(single_muon: tuple[str, Run], tmp_path: Path) -> None:
    override, single = single_muon
    ran = run(2, [override, "parallel.pipeline=2"], tmp_path / "run")
    if not torch.cuda.is_available():
        assert_bitwise(ran, single)
        return
    # On a GPU cuBLAS may take another kernel for the same Newton-Schulz product.
    losses = [[report["loss"] for report in reports] for reports, _ in (ran, single)]
    assert losses[0] == pytest.approx(losses[1], rel=MUON_BOUND)


@pytest.mark.parametrize("shape", [["parallel.pipeline=2"], PP2_VPP2], ids=["pp2", "pp2_vpp2"])
def test_the_table_equals_megatron_core_bit_for_bit(shape: list[str], tmp_path: Path) -> None:
    """Every edge carries the whole bank here, as in megatron-core's schedules."""
    theirs = run(2, shape, tmp_path / "megatron-core", via="megatron-core")
    assert_bitwise(run(2, shape, tmp_path / "table", via="whole bank"), theirs)


SEEING = ["vision=tiny", "data.images=[digits]", "data.sequence_length=40", "parallel.zero=0"]


@pytest.fixture(scope="module")
def single_seeing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(1, SEEING, tmp_path_factory.mktemp("parity") / "single_seeing")


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("bubbles", ["parallel.pipeline=2"]),
        ("bubbles", PP2_VPP2),
        ("inline", PP2_VPP2),
        ("phase", PP2_VPP2),
    ],
)
def test_a_tower_in_the_pipeline_stays_within_bound(
    mode: str, layout: list[str], single_seeing: Run, tmp_path: Path
) -> None:
    """The order in which the ranks' shares of the tower's gradients are summed differs from one rank's."""
    reports, tensors = run(2, [*SEEING, *layout, f"vision.mode={mode}"], tmp_path / "run")
    assert_close(reports, tensors, single_seeing, ("gradients", "weights"))
    assert reports[0]["loss"] == single_seeing[0][0]["loss"]
    names = {name for name in tensors["gradients"] if name.startswith("vision.")}
    assert len(names) == 18 and all(len(tensors["gradients"][name]) == 2 for name in names)


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.data=2", "offload.sites.vit.layer=recompute"],
        ["parallel.expert.size=2"],
        ["parallel.data=2", "parallel.zero=1"],
    ],
    ids=["dp2_recompute", "ep2", "dp2_zero1"],
)
def test_a_tower_over_data_ranks_stays_within_bound(
    layout: list[str], single_seeing: Run, tmp_path: Path
) -> None:
    reports, tensors = run(2, [*SEEING, "run.microbatches=2", *layout], tmp_path / "run")
    # Under ZeRO-1 a rank's buffer holds only its own shard of the reduced gradients.
    kinds = ("weights",) if "parallel.zero=1" in layout else ("weights", "gradients")
    assert_close(reports, tensors, single_seeing, kinds)


@pytest.mark.parametrize("layout", BOUNDED)
def test_layout_stays_within_bound(layout: str, single: Run, tmp_path: Path) -> None:
    world_size, overrides = BOUNDED[layout]
    reports, tensors = run(world_size, overrides, tmp_path / "run")
    # Under ZeRO-1 a rank's buffer holds only its own shard of the reduced gradients.
    kinds = ("weights", "gradients") if "parallel.zero=0" in overrides else ("weights",)
    assert_close(reports, tensors, single, kinds)


def assert_close(reports: Any, tensors: Any, single: Run, kinds: tuple[str, ...]) -> None:
    tied = tied_step(reports, single[0])
    for step, (report, expected) in enumerate(zip(reports, single[0], strict=True)):
        bound = LOSS_BOUND if step < tied else TIE_BOUND
        for key in expected.keys() & {"loss", "mtp_loss", "grad_norm"}:
            assert report[key] == pytest.approx(expected[key], rel=bound), (key, step)
    if tied < len(reports):
        # One token's gradient in a step of Adam, which makes every element's step equally large.
        kinds = tuple(kind for kind in kinds if kind != "weights")
    for kind in kinds:
        bound = {"weights": WEIGHT_BOUND, "gradients": GRADIENT_BOUND}[kind]
        assert tensors[kind].keys() == single[1][kind].keys()
        for name, copies in tensors[kind].items():
            expected_tensor = single[1][kind][name][0]
            for copy in copies:
                assert relative(copy, expected_tensor) <= bound, (kind, name)


def tied_step(reports: list[dict[str, Any]], expected: list[dict[str, Any]]) -> int:
    """The first step in which a token chose another expert, as it may on a GPU alone; else their number."""
    for step, (report, one) in enumerate(zip(reports[:-1], expected[:-1], strict=True)):
        pairs = [(report["loads"][name], load) for name, load in one["loads"].items()]
        moved = sum(abs(a - b) for own, other in pairs for a, b in zip(own, other, strict=True)) // 2
        if moved:
            assert torch.cuda.is_available(), (step, "a CPU adds in the same order each time")
            assert step > 0, "the first step has the same weights"
            assert moved <= TIED_TOKENS, (step, moved)
            return step
    return len(reports)


@pytest.mark.parametrize("layout", [["parallel.data=2"], ["parallel.expert.size=2"]], ids=["dp2", "ep2"])
def test_muon_over_data_ranks_stays_within_bound(
    layout: list[str], single_muon: tuple[str, Run], tmp_path: Path
) -> None:
    """With whole states under muon; in shards under muon_per_head."""
    override, (expected, _) = single_muon
    reports, _ = run(2, [override, *layout, "run.microbatches=2"], tmp_path / "run")
    losses = [report["loss"] for report in reports]
    # Newton-Schulz amplifies the last bits of a gradient.
    assert losses == pytest.approx([report["loss"] for report in expected], rel=MUON_BOUND)


def test_the_steps_train(single: Run) -> None:
    """Parity of runs that compute nothing would prove nothing."""
    gradients = single[1]["gradients"]
    still = [name for name, (gradient,) in gradients.items() if not gradient.abs().max() > 0]
    # An AttnRes norm meets a query of zero in the first step.
    assert all(name.endswith("_res.norm_weight") for name in still), still
    assert len({report["loss"] for report in single[0]}) == len(single[0])


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))

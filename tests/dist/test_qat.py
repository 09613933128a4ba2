"""Quantisation-aware training under expert parallelism: every way to compute it is the same training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.dist import runs
from tests.dist.launch import run_workers

EP2 = [
    "model.latent_size=32",
    "parallel.expert.size=2",
    "run.microbatches=2",
    "run.steps=2",
    "model.num_layers=3",
]
QAT = [*EP2, "quant=mxfp4_qat"]
MOONEP = ["parallel.expert.dispatcher=moonep"]
RUNS = {
    "plain": EP2,
    "alltoall": QAT,
    "not_held": [*QAT, "quant.hold_weights=false"],
    "moonep": [*QAT, *MOONEP],
    "moonep_waves": [*QAT, *MOONEP, "parallel.expert.slots=1", "offload.policy=recompute"],
    "moonep_zero2": [*QAT, *MOONEP, "parallel.virtual=3", "parallel.zero=2"],
    "muon": [*QAT, "optim=muon_per_head"],
}
LOSS_BOUND, GRADIENT_BOUND = 2e-6, 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qat")


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, list[float]]:
    """Of each run's steps; the ranks agree on them."""
    first, second = run_workers(
        "tests.dist.qat_worker:train", 2, {"runs": RUNS, "folder": str(folder)}, timeout=240
    )
    assert first == second
    return {name: [report["loss"] for report in reports] for name, reports in first.items()}


def expert_gradients(folder: Path, name: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for rank in range(2):
        found |= torch.load(folder / name / f"{rank}.pt")["gradients"]
    return {key: value for key, value in found.items() if ".experts." in key}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative norm of a difference between tensors of one name."""
    assert one.keys() == other.keys() and one
    return max(((one[key] - other[key]).norm() / other[key].norm()).item() for key in one)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["not_held", "moonep", "moonep_waves", "moonep_zero2"])
def test_is_the_same_however_it_is_computed(name: str, losses: dict[str, list[float]], folder: Path) -> None:
    assert losses[name] == pytest.approx(losses["alltoall"], rel=LOSS_BOUND if name != "not_held" else 0)
    gradients = [expert_gradients(folder, each) for each in (name, "alltoall", "plain")]
    assert distance(*gradients[:2]) < GRADIENT_BOUND
    # Were a borrowed expert left as it is, this much would show.
    assert distance(gradients[1], gradients[2]) > 1000 * GRADIENT_BOUND


def test_muon_and_the_loss_without(losses: dict[str, list[float]]) -> None:
    assert losses["muon"][0] == losses["alltoall"][0]
    assert losses["muon"][1:] != losses["alltoall"][1:]
    assert losses["alltoall"] == pytest.approx(losses["plain"], rel=1e-3)
    assert losses["alltoall"] != losses["plain"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_on_text_learns_as_without(tmp_path: Path) -> None:
    short = ["recipe=tiny", "parallel=single", "vision=none", "data.images=[]", "model.num_layers=4",
             "data.sequence_length=64", "run.microbatches=2", "run.steps=20", "eval.every=0",
             "checkpoint.every=0", "log.trace_steps=0", *runs.prepare_text(tmp_path)]  # fmt: skip
    curves = {}
    for name in ("none", "mxfp4_qat"):
        code, output = runs.train([*short, f"quant={name}", f"run.dir={tmp_path / name}"], timeout=240)
        assert code == 0, output
        curves[name] = [line["loss"] for line in runs.metrics(tmp_path / name)]
    assert len(curves["none"]) == 20 and curves["none"][-1] < 0.75 * curves["none"][0]
    assert curves["mxfp4_qat"] == pytest.approx(curves["none"], rel=2e-2)
    assert curves["mxfp4_qat"] != curves["none"]

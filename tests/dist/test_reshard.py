"""A run that goes on in another layout: four steps in one, four in the other, beside the run left alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .launch import run_workers
from .reshard_runs import STEPS, overrides
from .runs import metrics, prepare_text

# As in tests/parity: what the order of summation leaves of a loss, and what Newton-Schulz makes of it.
LOSS_BOUND, MUON_BOUND = 2e-6, 1e-4

UNEVEN, OTHER_CUT = "parallel.layers_per_chunk=[1,3,1,1]", "parallel.layers_per_chunk=[2,1,1,2]"
MOON = "parallel.expert.dispatcher=moonep"
EPLB = [MOON, "parallel.expert.policy=eplb", "parallel.expert.eplb_every=2", "parallel.expert.eplb_copies=1"]
PP2_VPP2 = ["parallel.pipeline=2", "parallel.virtual=2"]
WHOLE = ["parallel.zero=0"]


def batch(microbatches: int, size: int) -> list[str]:
    """The split of a data rank's samples."""
    return [f"run.microbatches={microbatches}", f"data.micro_batch_size={size}"]


SINGLE = batch(4, 2)
DP2 = ["parallel.data=2", *batch(4, 1)]
EP2 = ["parallel.expert.size=2", *batch(2, 2)]
CP2 = ["parallel.context=2", *batch(8, 1)]
ADAMW, MUON, PER_HEAD = "optim=adamw", "optim=muon", "optim=muon_per_head"

Move = tuple[int, list[str], int, list[str], str]
MOVES: dict[str, Move] = {
    "single to dp2": (1, SINGLE, 2, DP2, ADAMW),
    "uneven pp2_vpp2 to ep2 with MoonEP": (
        2,
        [*PP2_VPP2, UNEVEN, *SINGLE],
        2,
        [*EP2, MOON],
        PER_HEAD,
    ),
    "ep2 with copies to cp2 x ep2, ZeRO-2": (
        2,
        [*EP2, *EPLB],
        2,
        ["parallel.context=2", "parallel.expert.size=2", *EPLB, *batch(8, 1), "parallel.zero=2"],
        ADAMW,
    ),
    "dp2 to pp2_vpp2": (2, DP2, 2, [*PP2_VPP2, *SINGLE], ADAMW),
    "ep2 to cp2": (2, EP2, 2, CP2, ADAMW),
    "uneven cut to another cut, more in a group": (
        2,
        [*PP2_VPP2, UNEVEN, *SINGLE],
        2,
        [*PP2_VPP2, OTHER_CUT, "parallel.microbatch_group=4", *SINGLE],
        PER_HEAD,
    ),
    "pp2_vpp2 x dp2 to single": (4, [*PP2_VPP2, "parallel.data=2", *batch(2, 2)], 1, SINGLE, PER_HEAD),
    "ep2 with copies to ep4 with copies": (
        2,
        [*EP2, *EPLB],
        4,
        ["parallel.expert.size=4", *EPLB, *batch(2, 1)],
        PER_HEAD,
    ),
    "muon, single to ep2": (1, [*SINGLE, *WHOLE], 2, [*EP2, *WHOLE], MUON),
    "ZeRO-2 on the host to ZeRO-1 on disk": (
        2,
        [*DP2, "parallel.zero=2", "offload.gradients=host", "offload.optimizer=host"],
        2,
        [*PP2_VPP2, *SINGLE, "parallel.zero=1", "offload.optimizer=nvme"],
        ADAMW,
    ),
    "whole states to ZeRO-2, BF16": (
        2,
        [*DP2, *WHOLE, "model.dtype=bfloat16"],
        4,
        ["parallel.data=4", *batch(1, 2), "parallel.zero=2", "model.dtype=bfloat16"],
        ADAMW,
    ),
    "images, single to pp2": (
        1,
        [*SINGLE, "vision=tiny", "data.images=[digits]"],
        2,
        ["parallel.pipeline=2", *SINGLE, "vision=tiny", "data.images=[digits]", "vision.mode=inline"],
        ADAMW,
    ),
}
FAST = ("single to dp2", "uneven pp2_vpp2 to ep2 with MoonEP", "ep2 with copies to cp2 x ep2, ZeRO-2")
BF16_BOUND = 2e-3
"""One last place of BF16 is 4e-3; a loss is the mean over hundreds of tokens."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MOVES]
)
def test_a_run_goes_on_in_another_layout(name: str, tmp_path: Path) -> None:
    ranks, before, ranks_after, after, optimizer = MOVES[name]
    data, whole, moved = prepare_text(tmp_path), tmp_path / "whole", tmp_path / "moved"
    rest = [optimizer, "optim.lr=2e-3", f"offload.nvme_dir={tmp_path}/disk", "offload.window_mib=1"]
    _run(overrides(data, whole, *before, *rest), ranks)
    shutil.copytree(whole, moved)
    shutil.rmtree(moved / "checkpoints" / f"step-{STEPS:08d}")
    _run(overrides(data, moved, *after, *rest), ranks_after)

    alone, went_on = metrics(whole), metrics(moved)
    assert went_on[:4] == alone[:4] and [line["step"] for line in went_on] == list(range(1, STEPS + 1))
    bound = (
        BF16_BOUND if "model.dtype=bfloat16" in before else MUON_BOUND if "muon" in optimizer else LOSS_BOUND
    )
    for line, expected in zip(went_on[4:], alone[4:], strict=True):
        assert line["tokens"] == expected["tokens"] and line["lr"] == expected["lr"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=bound)
        assert line["mtp_loss"] == pytest.approx(expected["mtp_loss"], rel=bound)
    assert len({line["loss"] for line in alone}) == STEPS
    _assert_told(moved)


def _assert_told(run_dir: Path) -> None:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["kind"] == "layout"]
    assert told["step"] == 4 and "parallel." in told["text"] and " -> " in told["text"]
    assert (run_dir / "config-to-step-00000004.yaml").is_file()
    assert (run_dir / "config.yaml").read_text() != (run_dir / "config-to-step-00000004.yaml").read_text()


def _run(arguments: list[str], ranks: int) -> None:
    assert run_workers("tests.dist.reshard_runs:run", ranks, {"arguments": arguments}) == [""] * ranks


def test_another_number_of_samples_in_a_step_is_refused(tmp_path: Path) -> None:
    data, run_dir = prepare_text(tmp_path), tmp_path / "run"
    _run(overrides(data, run_dir, *SINGLE, "run.steps=4"), 1)
    wider = overrides(data, run_dir, "parallel.data=2", *SINGLE)
    remedy = "; set run.microbatches=2, or change it in a new stage of curriculum.stages"
    product = "data.micro_batch_size x run.microbatches x parallel.data = 16 samples a step"
    answers: list[Any] = run_workers("tests.dist.reshard_runs:run", 2, {"arguments": wider})
    assert answers == [f"{product}, and the run in {run_dir} has 8{remedy}"] * 2
    # Without the run's own notes the checkpoint says so.
    (run_dir / "config.yaml").unlink()
    answers = run_workers("tests.dist.reshard_runs:run", 2, {"arguments": wider})
    assert answers == [f"{product}, and step-00000004 has 8{remedy}"] * 2

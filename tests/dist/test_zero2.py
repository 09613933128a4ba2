"""Pipeline ZeRO-2 against a plain reference on stock buffers, in every layout, with shards on every tier.

`grouped` is ZeRO-1 summed burst by burst, which ZeRO-2 must equal bit for bit; where a chunk has one burst in
a step, stock ZeRO-1 is that too. Against stock ZeRO-1 in general only the order of FP32 additions differs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist import runs
from tests.dist.launch import run_workers

pytestmark = pytest.mark.timeout(600)

DP2 = ["parallel.data=2", "run.microbatches=4"]
PP2_VPP2 = [*DP2, "parallel.pipeline=2", "parallel.virtual=2"]
VPP3 = [*DP2, "parallel.virtual=3", "parallel.microbatch_group=2"]
LOSS_BOUND, WEIGHT_BOUND = 1e-6, 1e-5
NAN_BYTES = 4

Answer = dict[str, Any]


def zero2(overrides: list[str], *more: str, **other: Any) -> dict[str, Any]:
    return {"overrides": [*overrides, "parallel.zero=2", *more], **other}


def zero1(overrides: list[str], *more: str, **other: Any) -> dict[str, Any]:
    return {"overrides": [*overrides, "parallel.zero=1", *more], **other}


def run(ranks: int, cases: list[dict[str, Any]], steps: int = 3) -> list[list[Answer]]:
    """By case, what each rank said."""
    args = {"cases": cases, "steps": steps}
    answers = run_workers("tests.dist.zero2_worker:run", ranks, args, timeout=500)
    return [[said[number] for said in answers] for number in range(len(cases))]


def assert_bitwise(first: list[Answer], second: list[Answer]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one["reports"] == other["reports"]
        assert one["parameters"] == other["parameters"]


def assert_close(first: list[Answer], second: list[Answer]) -> None:
    for one, other in zip(first, second, strict=True):
        for step, expected in zip(one["reports"], other["reports"], strict=True):
            assert step == pytest.approx(expected, rel=LOSS_BOUND)
        assert one["values"] == pytest.approx(other["values"], abs=WEIGHT_BOUND * 100, rel=WEIGHT_BOUND)


def formula(answer: Answer, store: str) -> float:
    """4 N / DP + 2 x 4 x the largest chunk; each buffer has its own DP."""
    sizes = [sum(numel for numel, _ in chunk) for chunk in answer["numel"]]
    shards = sum(4 * numel / ranks for chunk in answer["numel"] for numel, ranks in chunk)
    return 8 * max(sizes) + (shards if store == "device" else 0)


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_all_stores_equal_the_reference_bit_for_bit(steps: int, tmp_path: Path) -> None:
    nvme = ["offload.gradients=nvme", f"offload.nvme_dir={tmp_path}"]
    device, host, disk, grouped, stock = run(
        4,
        [
            zero2(PP2_VPP2),
            zero2(PP2_VPP2, "offload.gradients=host"),
            zero2(PP2_VPP2, *nvme),
            zero1(PP2_VPP2, grouped=True),
            zero1(PP2_VPP2),
        ],
        steps,
    )
    for found in (device, host, disk):
        assert_bitwise(found, grouped)
    assert_close(device, stock)
    assert device[0]["parameters"] != stock[0]["parameters"], "two groups a step, and the same order of sums"
    for answers, store in ((device, "device"), (host, "host"), (disk, "nvme")):
        for answer in answers:
            extra = answer["peak"] - formula(answer, store)
            assert 0 <= extra <= NAN_BYTES * len(answer["numel"])


ONCE = [*DP2, "parallel.virtual=3", "parallel.microbatch_group=4"]
EXPERTS = [*VPP3, "parallel.expert.size=2"]
MOON = [*EXPERTS, "parallel.expert.dispatcher=moonep"]
PLAIN = [*VPP3, "model.mtp_layers=0"]
SEEING = ["vision=tiny", "data.images=[digits]", "run.microbatches=4"]
HALF = [*VPP3, "model.dtype=bfloat16"]
AGAIN = [*VPP3, "offload.policy=recompute"]
HOST = ["offload.gradients=host"]


def assert_pairs(ranks: int, cases: dict[str, tuple[Any, Any]]) -> dict[str, list[Answer]]:
    """Both of each pair end the same; what the first of each said."""
    answers = run(ranks, [case for pair in cases.values() for case in pair])
    for name, found, expected in zip(cases, answers[::2], answers[1::2], strict=True):
        print(name)
        assert_bitwise(found, expected)
    return dict(zip(cases, answers[::2], strict=True))


def test_layouts_of_two_ranks() -> None:
    answers = assert_pairs(
        2,
        {
            "one burst": (zero2(ONCE), zero1(ONCE)),
            "experts": (zero2(EXPERTS), zero1(EXPERTS, grouped=True)),
            "tower": (zero2([*VPP3, *SEEING], *HOST), zero1([*VPP3, *SEEING], grouped=True)),
            "BF16": (
                zero2(HALF, "offload.optimizer=host", "offload.window_mib=1"),
                zero1(HALF, grouped=True),
            ),
        },
    )
    for answer in answers["experts"]:
        assert [ranks for _, ranks in answer["numel"][0]] == [2, 1]
        assert 0 <= answer["peak"] - formula(answer, "device") <= 3 * NAN_BYTES


@pytest.mark.slow
def test_more_layouts_of_two_ranks() -> None:
    answers = assert_pairs(
        2,
        {
            "one chunk": (zero2(DP2, most=2), zero1(DP2, most=2, grouped=True)),
            "one chunk, one burst": (zero2(DP2), zero1(DP2)),
            "experts on the host": (zero2(EXPERTS, *HOST), zero1(EXPERTS, grouped=True)),
            "no MTP": (zero2(PLAIN), zero1(PLAIN, grouped=True)),
            "MoonEP": (zero2(MOON), zero1(MOON, grouped=True)),
            "recompute": (zero2(AGAIN), zero1(AGAIN, grouped=True)),
        },
    )
    for answer in answers["one chunk, one burst"]:
        numel = sum(numel for numel, _ in answer["numel"][0])
        assert answer["peak"] == 4 * numel / 2 + 4 * numel + NAN_BYTES, "one slot is enough"


@pytest.mark.slow
def test_layouts_of_four_ranks() -> None:
    deep = [*DP2, "parallel.pipeline=2", "parallel.virtual=3"]
    wide = ["parallel.data=4", "parallel.expert.size=2", "run.microbatches=2", "parallel.virtual=3"]
    seeing = [*PP2_VPP2, *SEEING]
    answers = assert_pairs(
        4,
        {
            "virtual 3": (zero2(deep, *HOST), zero1(deep, grouped=True)),
            "experts on two ranks": (zero2(wide), zero1(wide, grouped=True)),
            "tower in the pipeline": (zero2(seeing), zero1(seeing, grouped=True)),
        },
    )
    for answer in answers["experts on two ranks"]:
        assert [ranks for _, ranks in answer["numel"][0]] == [4, 2]
        assert 0 <= answer["peak"] - formula(answer, "device") <= 3 * NAN_BYTES


@pytest.mark.slow
def test_three_ranks() -> None:
    """Not a power of two: the scaling of token losses comes after the sums, so that order still holds."""
    shape = ["parallel.data=3", "run.microbatches=4", "parallel.virtual=3", "parallel.microbatch_group=2"]
    assert_pairs(3, {"data 3": (zero2(shape), zero1(shape, grouped=True))})


def test_streamed_states_change_no_bit(tmp_path: Path) -> None:
    disk = ["offload.optimizer=nvme", f"offload.nvme_dir={tmp_path}", "offload.window_mib=1"]
    host = ["offload.optimizer=host", "offload.window_mib=1"]
    stock, first, second, plain, third, fourth = run(
        2,
        [
            zero1(DP2),
            zero1(DP2, *host),
            zero1(DP2, *disk),
            zero2(VPP3),
            zero2(VPP3, *disk, "offload.gradients=host"),
            zero2(VPP3, *host, "offload.gradients=nvme", f"offload.nvme_dir={tmp_path}"),
        ],
    )
    assert_bitwise(first, stock)
    assert_bitwise(second, stock)
    assert_bitwise(third, plain)
    assert_bitwise(fourth, plain)


def test_resume_is_bitwise_and_crosses_tiers(tmp_path: Path) -> None:
    """ZeRO-1 and 2 have the same shards, and a checkpoint does not say where they were."""
    once = [*DP2, "parallel.virtual=3", "parallel.microbatch_group=4"]
    disk = [
        "offload.gradients=nvme",
        "offload.optimizer=nvme",
        f"offload.nvme_dir={tmp_path}",
        "offload.window_mib=1",
    ]
    pairs = [
        [zero2(VPP3), zero2(VPP3)],
        [zero2(VPP3, *disk), zero2(VPP3, *disk)],
        [zero1(once), zero2(once, "offload.optimizer=host")],
        [zero2(once, *disk, "model.dtype=bfloat16"), zero1(once, "model.dtype=bfloat16")],
    ]
    args = {"pairs": pairs, "root": str(tmp_path / "checkpoints")}
    for said in run_workers("tests.dist.zero2_worker:resumed", 2, args, timeout=300):
        for answer in said:
            assert answer["rest"] == answer["whole"]


def test_the_plan_counts_what_a_store_below_the_device_moves() -> None:
    """Bytes of the stores of two ranks; all but the padding of buffers is in the plan."""
    host = "offload.gradients=host"
    cases = [
        zero2(VPP3, host, "optim=adamw"),
        zero2(VPP3, host, "optim=muon_per_head"),
        zero2(DP2, host, "optim=adamw"),
    ]
    for said in run_workers("tests.dist.zero2_worker:moved", 2, {"cases": cases}, timeout=200):
        for answer, sums in zip(said, (2, 2, 1), strict=True):
            planned = answer["planned"]
            assert planned["out"] == sums * planned["back"] and not planned["read"]
            for out, back in answer["steps"]:
                assert out == pytest.approx(planned["out"], rel=0.01)
                assert back == pytest.approx(planned["back"], rel=0.01)


def test_slots_rotate_and_what_must_hold_meanwhile() -> None:
    """Order of slots, parked views, handles, flags, refusals; and a stale view, which no value shows."""
    case = zero2([*VPP3, "parallel.expert.size=2"], stale=True)
    for answer in run_workers("tests.dist.zero2_worker:watched", 2, {"case": case}, timeout=120):
        assert answer["order"] == [[2, 0, 2], [1, 1, 2], [0, 0, 2], [2, 1, 2], [1, 0, 2], [0, 1, 2]]
        assert answer["dispatched"] == [False] * 6
        assert answer["exposed"]
        assert len(answer["refused"]) == 6
        assert answer["stale"].endswith("a view of another slot")


def test_a_step_that_is_not_finite_is_explained_on_every_tier() -> None:
    cases = [
        zero1(VPP3),
        zero2(VPP3),
        zero2(VPP3, "offload.gradients=host"),
        zero2(VPP3, "offload.gradients=host", "optim=muon_per_head"),
    ]
    for told in run_workers("tests.dist.zero2_worker:not_finite", 2, {"cases": cases}, timeout=120):
        assert told[0].startswith("step 1: the output of layer 2 is not finite on rank 0, micro-batch 0")
        assert told == [told[0]] * 4


def test_per_head_muon_finds_its_gradients() -> None:
    """On the device as views of the shards; from the host all at once, in the idle slots."""
    shape = [*VPP3, "optim=muon_per_head"]
    device, host, grouped = run(
        2, [zero2(shape), zero2(shape, "offload.gradients=host"), zero1(shape, grouped=True)]
    )
    assert_bitwise(device, grouped)
    assert_bitwise(host, grouped)


def test_a_run_on_disk_is_continued_bit_for_bit(tmp_path: Path) -> None:
    """The user's command: it warns that two chunks do not pay; a checkpoint holds what lay on the disk."""
    run_dir, data = tmp_path / "run", runs.prepare_text(tmp_path)
    arguments = runs.overrides(
        data,
        run_dir,
        "parallel.pipeline=1",
        "parallel.data=2",
        "parallel.zero=2",
        "offload.gradients=nvme",
        "offload.optimizer=nvme",
        f"offload.nvme_dir={tmp_path}/disk",
        "offload.window_mib=1",
        "eval.every=0",
    )
    code, output = runs.train(arguments)
    assert code == 0, output
    assert "parallel.zero=2 holds" in output and "pays with more chunks on a rank" in output
    straight = runs.metrics(run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000008")
    code, output = runs.train(arguments)
    assert code == 0, output
    assert "behind step 6" in output
    assert runs.metrics(run_dir) == straight
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may try to write there")
def test_a_run_stops_with_its_last_checkpoint_intact(tmp_path: Path) -> None:
    run_dir, data = tmp_path / "run", runs.prepare_text(tmp_path)
    arguments = runs.overrides(
        data,
        run_dir,
        "parallel.pipeline=1",
        "parallel.virtual=1",
        "parallel.zero=1",
        "offload.optimizer=nvme",
        "offload.nvme_dir=/proc",
        "run.steps=2",
    )
    code, output = runs.train([*arguments, "offload.on_failure=stop"])
    assert code != 0
    assert "set offload.nvme_dir or offload.on_failure=fallback" in output and "Traceback" not in output
    code, output = runs.train(arguments)
    assert code == 0, output
    assert output.count("stays in host memory from now on") == 1

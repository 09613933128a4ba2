"""ZeRO-2 on two GPUs: the same shards on every tier, and what the allocator says that they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.launch import run_workers
from tests.dist.test_zero2 import VPP3, Answer, run, zero1, zero2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CLOSE = 1e-5


def assert_close(first: list[Answer], second: list[Answer]) -> None:
    """Some kernels add with atomics, in any order."""
    for one, other in zip(first, second, strict=True):
        for step, expected in zip(one["reports"], other["reports"], strict=True):
            assert step == pytest.approx(expected, rel=CLOSE)


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiers_agree(dtype: str, tmp_path: Path) -> None:
    shape = [*VPP3, f"model.dtype={dtype}"]
    disk = [f"offload.nvme_dir={tmp_path}", "offload.window_mib=1"]
    reference, *others = run(
        2,
        [
            zero1(shape, grouped=True),
            zero2(shape),
            zero2(shape, "offload.gradients=host"),
            zero2(shape, "offload.gradients=nvme", "offload.optimizer=host", *disk),
            zero2(shape, "offload.gradients=host", "offload.optimizer=nvme", *disk),
        ],
        steps=4,
    )
    for found in others:
        assert_close(found, reference)


def test_resume_crosses_tiers(tmp_path: Path) -> None:
    disk = ["offload.gradients=nvme", "offload.optimizer=nvme", f"offload.nvme_dir={tmp_path}"]
    half = [*VPP3, "model.dtype=bfloat16"]
    pairs = [[zero2(half, *disk), zero2(half)], [zero2(half), zero2(half, "offload.optimizer=host")]]
    args = {"pairs": pairs, "root": str(tmp_path / "checkpoints")}
    for said in run_workers("tests.dist.zero2_worker:resumed", 2, args, timeout=240):
        for answer in said:
            for step, expected in zip(answer["rest"][0], answer["whole"][0], strict=True):
                assert step == pytest.approx(expected, rel=CLOSE)

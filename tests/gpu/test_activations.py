"""Activations on every tier of a GPU, with the fastest kernels: the same losses as if all had stayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHRUNK = [
    "recipe=h200_small",
    "model.num_layers=5",
    "data.sequence_length=2048",
    "data.micro_batch_size=1",
    "data.max_bytes=4000000",
    "run.microbatches=4",
    "run.steps=3",
    "offload.inflight_mib=64",
]
# Some kernels add with atomics, in any order; FP8 rounds to 4 bits.
SAME, CODED = 2e-3, 2e-2
LOSSLESS = ["host", "recompute", "selective", "nvme"]


def run(policies: list[list[str]], folder: Path, ranks: int, *more: str) -> list[dict[str, Any]]:
    """What rank 0 says of three steps under each policy."""
    layout = [*SHRUNK, f"data.cache_dir={folder}", *more]
    args = {"layout": layout, "policies": policies, "steps": 3}
    target = "tests.gpu.test_activations:worker"
    found: list[dict[str, Any]] = run_workers(target, ranks, args, timeout=500)[0]
    return found


def worker(layout: list[str], policies: list[list[str]], steps: int) -> list[dict[str, Any]]:
    """One rank: losses and the manager's counts under each policy."""
    import os

    from k3train.train.assemble import build_trainer, set_numerics, topology
    from k3train.train.inputs import Inputs
    from k3train.train.step import train_step
    from launch.compose import ready
    from parallel.groups import destroy
    from tests.dist.zero2_worker import join

    answers = []
    for policy in policies:
        config = ready([*layout, *policy], inputs=False)
        assert config.parallel.data is not None and int(os.environ["WORLD_SIZE"]) >= 1
        set_numerics(config)
        groups = join(topology(config))
        trainer, inputs = build_trainer(config, groups), Inputs(config, groups)
        torch.cuda.reset_peak_memory_stats()
        results = [train_step(trainer, inputs.next_step(), step) for step in range(1, steps + 1)]
        inputs.close()
        answer: dict[str, Any] = {
            "losses": [result.losses.loss for result in results],
            "peak": torch.cuda.max_memory_allocated(),
        }
        if (manager := trainer.pipeline.activations) is not None:
            answer |= {"held": dict(manager.ledger.peak), "left": manager.ledger.now()}
            manager.close()
        answers.append(answer)
    destroy()
    return answers


def test_losses_are_the_same_wherever_activations_lie(tmp_path: Path) -> None:
    disk = ["offload.nvme_gb=8", f"offload.nvme_dir={tmp_path}"]
    policies = [[f"offload.policy={name}", "offload.host_gb=16", *disk] for name in LOSSLESS]
    coded = [[f"offload.policy={name}", "offload.host_gb=16"] for name in ("fp8_host", "mixed")]
    kept, *found = run([["offload.policy=keep"], *policies, *coded], tmp_path, 1)
    for policy, answer in zip([*policies, *coded], found, strict=True):
        bound = SAME if policy in policies else CODED
        assert answer["losses"] == pytest.approx(kept["losses"], rel=bound), policy
        assert answer["peak"] < kept["peak"], policy
        assert not any(answer["left"].values()), (policy, answer["left"])
    assert found[0]["held"]["host"] > 1e8, "something has been moved"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_early_stage_borrows_a_late_ones_memory(tmp_path: Path) -> None:
    piped = ["parallel.pipeline=2"]
    peer = ["offload.policy=peer", "offload.peer_gb=8"]
    kept, lent = run([["offload.policy=keep"], peer], tmp_path, 2, *piped)
    assert lent["losses"] == pytest.approx(kept["losses"], rel=SAME)
    assert lent["held"]["peer"] > 1e8
    assert not any(lent["left"].values())

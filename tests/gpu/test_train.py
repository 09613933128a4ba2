"""h200_small with fewer layers on GPUs: it learns, agrees with plain torch, resumes, and spreads.

Every run is a process of its own, as under torchrun. The head shape stays that of h200_small, so that kernels
compiled for it serve here.
"""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.launch import run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SHRUNK = (
    "recipe=h200_small",
    "model.num_layers=5",
    "data.sequence_length=2048",
    "data.micro_batch_size=1",
    "data.max_bytes=4000000",
    "run.microbatches=4",
    "run.steps=5",
)
PLAIN = (
    "model.dtype=float32",
    "model.backends.kda=chunk",
    "model.backends.short_conv=shift",
    "model.backends.attn_res=lean",
    "model.backends.situ=lean",
    "model.backends.attention=sdpa",
    "model.backends.linear=local",
)
LAYOUTS = {
    "expert 2": ["parallel.expert.size=2", "run.microbatches=2"],
    "pipeline 2": ["parallel.pipeline=2"],
}
STEPS = 3
# BF16 rounds to 8 bits and every kernel in another order; three steps amplify it.
LOSS_BOUND, NORM_BOUND = 2e-2, 5e-2
# Without any rounding to 8 bits on one side: 2.9 % were seen in the third step's MTP loss.
FLOAT32_BOUND = 5e-2
# The same kernels in the same order, but for the atomic additions of some of them.
REPEAT_BOUND = 2e-3


def run(folder: Path, overrides: list[str], steps: int = STEPS, world_size: int = 1) -> list[dict[str, Any]]:
    """What rank 0 of a run reports of each step; the ranks must agree."""
    args = {"overrides": [*overrides, f"data.cache_dir={folder}"], "steps": steps}
    reports = run_workers("tests.gpu.test_train:train", world_size, args, timeout=240)
    assert all(report == reports[0] for report in reports), "ranks disagree about the step"
    steps_of_rank: list[dict[str, Any]] = reports[0]
    return steps_of_rank


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def single(cache: Path) -> list[dict[str, Any]]:
    """Five steps in BF16 with the backends that `auto` takes."""
    return run(cache, [], steps=5)


def assert_close(
    reports: list[dict[str, Any]], expected: list[dict[str, Any]], bound: float = LOSS_BOUND
) -> None:
    for key in ("loss", "mtp_loss"):
        values = [report[key] for report in expected[:STEPS]]
        assert [report[key] for report in reports[:STEPS]] == pytest.approx(values, rel=bound), key
    assert reports[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=NORM_BOUND)


def test_bfloat16_with_the_fastest_backends_learns(single: list[dict[str, Any]]) -> None:
    losses = [report["loss"] for report in single]
    assert losses[0] == pytest.approx(math.log(32768), abs=0.5)
    # Bytes alone, 257 of 32768 ids, are worth nearly five nats.
    assert losses[-1] < losses[0] - 1, losses
    assert single[-1]["mtp_loss"] < single[0]["mtp_loss"]
    assert all(report["updated"] for report in single)


def test_chunk_form_and_kernel_of_kda_give_the_same_losses(single: list[dict[str, Any]], cache: Path) -> None:
    pytest.importorskip("fla")
    assert_close(run(cache, ["model.backends.kda=chunk"]), single)


def test_float32_in_plain_torch_gives_the_same_losses(single: list[dict[str, Any]], cache: Path) -> None:
    assert_close(run(cache, list(PLAIN)), single, FLOAT32_BOUND)


def test_resume_restores_every_tensor_and_the_next_losses(cache: Path, tmp_path: Path) -> None:
    args = {"root": str(tmp_path / "checkpoints"), "overrides": [f"data.cache_dir={cache}"]}
    (answer,) = run_workers("tests.gpu.test_train:straight_and_resumed", 1, args, timeout=240)
    assert answer["tensors"] > 100
    assert answer["different"] == []
    assert answer["extra"] == {"step": 2}
    straight, resumed = answer["straight"], answer["resumed"]
    assert len(straight) == 2 and straight[0] != straight[1]
    assert resumed == pytest.approx(straight, rel=REPEAT_BOUND)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_compute_what_one_does(layout: str, single: list[dict[str, Any]], cache: Path) -> None:
    assert_close(run(cache, LAYOUTS[layout], world_size=2), single)


def build(overrides: list[str]) -> tuple[Any, Any]:
    """Trainer and inputs of this rank; further imports wait for `enable_cpu`, which the launcher calls."""
    from k3train.train.assemble import build_trainer, set_numerics, topology
    from k3train.train.inputs import Inputs
    from launch.compose import compose, resolve_layout
    from parallel.groups import initialize

    config = resolve_layout(compose([*SHRUNK, *overrides]), int(os.environ["WORLD_SIZE"]))
    set_numerics(config)
    groups = initialize(topology(config), timeout_minutes=5, seed=config.run.seed)
    return build_trainer(config, groups), Inputs(config, groups)


def train(overrides: list[str], steps: int) -> list[dict[str, Any]]:
    """Figures of the first steps on the bundled text."""
    from k3train.train.step import train_step
    from parallel.groups import destroy

    trainer, inputs = build(overrides)
    results = [train_step(trainer, inputs.next_step(), step) for step in range(1, steps + 1)]
    inputs.close()
    destroy()
    return [
        {
            "loss": result.losses.loss,
            "mtp_loss": result.losses.mtp_loss,
            "grad_norm": result.grad_norm,
            "updated": result.updated,
        }
        for result in results
    ]


def straight_and_resumed(root: str, overrides: list[str]) -> dict[str, Any]:
    """Four steps with a save after the second; then a new trainer that loads it and takes the last two."""
    from k3train.checkpoint.manager import CheckpointManager
    from k3train.config import fixed_keys
    from k3train.train.assemble import build_trainer
    from k3train.train.step import train_step
    from parallel.groups import destroy

    trainer, inputs = build(["run.deterministic=true", *overrides])
    manager = CheckpointManager(
        Path(root),
        groups=trainer.groups,
        keep=1,
        asynchronous=True,
        fixed=fixed_keys(trainer.config),
        message=print,
    )
    for step in (1, 2):
        train_step(trainer, inputs.next_step(), step)
    manager.save(2, trainer.modules, trainer.optimizer, {"step": 2})
    saved = tensors(trainer)
    straight = [train_step(trainer, inputs.next_step(), step).losses.loss for step in (3, 4)]
    assert manager.wait(), "the checkpoint was not published"

    fresh = build_trainer(trainer.config, trainer.groups)
    extra = manager.load(fresh.modules, fresh.optimizer)
    loaded = tensors(fresh)
    different = [
        name
        for name in sorted(saved.keys() | loaded.keys())
        if name not in saved or name not in loaded or not torch.equal(saved[name], loaded[name])
    ]
    inputs.seek(2)
    resumed = [train_step(fresh, inputs.next_step(), step).losses.loss for step in (3, 4)]
    inputs.close()
    destroy()
    return {
        "tensors": len(saved),
        "different": different,
        "extra": extra,
        "straight": straight,
        "resumed": resumed,
    }


def tensors(trainer: Any) -> dict[str, Tensor]:
    """Copies, on the host, of every parameter, persistent buffer, master weight and moment."""
    from k3train.optim.build import sub_optimizers

    found: dict[str, Tensor] = {}
    for model in trainer.models:
        found |= {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    for index, part in enumerate(sub_optimizers(trainer.optimizer)):
        parameters = itertools.chain.from_iterable(group["params"] for group in part.optimizer.param_groups)
        for place, parameter in enumerate(parameters):
            found[f"optimizer {index} master {place}"] = parameter
            for key, value in part.optimizer.state[parameter].items():
                found[f"optimizer {index} {key} {place}"] = torch.as_tensor(value)
    return {name: value.detach().cpu().clone() for name, value in found.items()}

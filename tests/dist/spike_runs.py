"""What the ranks of the tests of loss spikes do: whole runs on a text some samples of which are bad."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.dist import runs

STEPS = 12
SAMPLES = 4
"""Of a step: two micro-batches of two sequences."""
WATCHED = (
    "fault.spike.threshold=4", "fault.spike.floor=0.5", "fault.spike.window=4", "fault.spike.steps=2",
)  # fmt: skip
NEVER = 255
"""A token that the text does not have; where the labels are nothing else the loss jumps."""


def overrides(data: list[str], run_dir: Path, *more: str) -> list[str]:
    """12 steps on two pipeline ranks, with a checkpoint every four."""
    own = (
        "log=quiet",
        "optim.lr=1e-2",
        f"run.steps={STEPS}",
        "eval.every=0",
        "checkpoint.every=4",
        "checkpoint.keep=0",
    )
    return runs.overrides(data, run_dir, *own, *more)


class Altered:
    """Training samples some of which are bad, or left out."""

    def __init__(self, samples: Any, bad: Sequence[int], without: Sequence[int]) -> None:
        self.samples, self.bad, self.without = samples, set(bad), set(without)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        kept = (number for number in range(len(self) + len(self.without)) if number not in self.without)
        number = next(number for place, number in enumerate(kept) if place == index)
        sample = self.samples.blend[number]
        if number in self.bad:
            sample = sample | {"labels": np.full_like(sample["labels"], NEVER)}
        return sample


def run(
    arguments: list[str],
    bad_steps: Sequence[int] = (),
    without_steps: Sequence[int] = (),
    stop_at: int | None = None,
) -> int:
    """`k3train train` as a rank under torchrun would.

    Args:
        bad_steps: steps, of a run without rollbacks, whose samples are bad.
        without_steps: those whose samples are not in the data at all.
        stop_at: ask to stop while that step runs, the how manieth of this process it is.
    """
    from k3train.train import session
    from k3train.train.inputs import Inputs
    from k3train.train.loop import train
    from launch.compose import ready_stages

    build, step, trained = Inputs._texts, session.train_step, 0

    def altered(self: Inputs, say: Any) -> Any:
        train_samples, valid = build(self, say)
        return Altered(train_samples, _samples(bad_steps), _samples(without_steps)), valid

    def stopping(*given: Any) -> Any:
        nonlocal trained
        trained += 1
        if trained == stop_at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*given)

    Inputs._texts = altered  # type: ignore[method-assign]
    session.train_step = stopping
    return train(ready_stages(arguments), lambda done: ready_stages(arguments, done=done))


def _samples(steps: Sequence[int]) -> list[int]:
    return [number for step in steps for number in range((step - 1) * SAMPLES, step * SAMPLES)]

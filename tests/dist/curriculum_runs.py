"""What the ranks of the curriculum tests do: whole runs in three stages, in this process."""

from __future__ import annotations

import os
import signal
import weakref
from pathlib import Path
from typing import Any

from tests.parity.worker import SMALL

STAGES = (
    "{a: {steps: 3, data: {sequence_length: 32}, parallel: {data: 2}},"
    " b: {steps: 3, run: {microbatches: 1}, parallel: {pipeline: 2, virtual: 2, zero: 1},"
    " data: {sequence_length: 64, long_documents: {at_least: 300, times: 3}}},"
    " c: {steps: 2, parallel: {context: 2, expert: {size: 2}, zero: 2},"
    " data: {sequence_length: 128, micro_batch_size: 1, long_documents: {at_least: 1000, times: 2}}}}"
)
STEPS = 8


def overrides(data: list[str], run_dir: Path, *more: str) -> list[str]:
    """8 steps on two ranks: data 2, then pipeline 2 x virtual 2, then context 2 with experts spread."""
    own = ("data.sequence_length=", "run.steps=")
    return [
        *(text for text in SMALL if not text.startswith(own)),
        "run.microbatches=2",
        "log=quiet",
        "eval.every=0",
        "eval.batches=2",
        f"curriculum.stages={STAGES}",
        "checkpoint.every=1",
        "checkpoint.keep=0",
        f"run.dir={run_dir}",
        *data,
        *more,
    ]


def run(arguments: list[str], stop_at: int | None = None) -> list[int]:
    """`k3train train` as a rank under torchrun would; `stop_at`: ask to stop while that step runs.

    Returns:
        the exit status, and how many of the stages that were left behind still hold memory.
    """
    from k3train.train import session
    from k3train.train.loop import train
    from launch.compose import ready_stages

    if stop_at is not None:
        step = session.train_step

        def stopping(trainer: Any, batches: Any, number: int, *rest: Any) -> Any:
            if number == stop_at and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            return step(trainer, batches, number, *rest)

        session.train_step = stopping
    left: list[Any] = []
    take_down = session.Session._take_down

    def watched(self: session.Session) -> None:
        left.append(weakref.ref(self.trainer.optimizer))
        left.extend(
            weakref.ref(buffer.grad_data) for chunk in self.trainer.chunks for buffer in chunk.buffers
        )
        take_down(self)

    session.Session._take_down = watched  # type: ignore[method-assign]
    code = train(ready_stages(arguments), lambda done: ready_stages(arguments, done=done))
    return [code, sum(each() is not None for each in left)]

"""What the ranks of the resharding tests do: whole runs, in this process."""

from __future__ import annotations

from pathlib import Path

from tests.parity.worker import SMALL

STEPS = 8


def overrides(data: list[str], run_dir: Path, *more: str) -> list[str]:
    """Eight steps of eight samples, with a checkpoint behind the fourth."""
    own = ("run.steps=", "data.micro_batch_size=")
    return [
        *(text for text in SMALL if not text.startswith(own)),
        f"run.steps={STEPS}",
        "log=quiet",
        "eval.every=0",
        "eval.batches=2",
        "checkpoint.every=4",
        "checkpoint.keep=0",
        f"run.dir={run_dir}",
        *data,
        *more,
    ]


def run(arguments: list[str]) -> str:
    """`k3train train` as a rank under torchrun would; what refused it, if anything."""
    from k3train.errors import UserError
    from k3train.train.loop import train
    from launch.compose import ready_stages

    try:
        assert train(ready_stages(arguments), lambda done: ready_stages(arguments, done=done)) == 0
    except UserError as error:
        return str(error)
    return ""

"""What the ranks of the test of a full disk do: a run that can write no large file from some step on."""

from __future__ import annotations

import resource
import signal
from typing import Any

FILE_LIMIT = 16 << 10


def run(arguments: list[str], full_from: int | None = None) -> int:
    """`k3train train`; from step `full_from` on no file of this rank grows beyond the limit."""
    from k3train.train import session
    from k3train.train.loop import train
    from launch.compose import ready_stages

    step = session.train_step

    def filling(trainer: Any, batches: Any, number: int, *rest: Any) -> Any:
        if number == full_from:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))
        return step(trainer, batches, number, *rest)

    session.train_step = filling
    return train(ready_stages(arguments))

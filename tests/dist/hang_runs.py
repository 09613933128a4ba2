"""What the ranks of the test of hangs do: a run in which rank 1 stops itself, as a machine that freezes."""

from __future__ import annotations

import os
import signal
from typing import Any


def run(arguments: list[str], where: str) -> int:
    """`k3train train`; rank 1 stops in its imports, before it meets the others, or in step 3."""
    from k3train.train import session
    from k3train.train.loop import train
    from launch.compose import ready_stages

    if os.environ["RANK"] == "1":
        if where == "imports":
            _stop()
        initialize, step = session.initialize, session.train_step

        def meet(*given: Any, **named: Any) -> Any:
            if where == "meet":
                _stop()
            return initialize(*given, **named)

        def third(trainer: Any, batches: Any, number: int, *rest: Any) -> Any:
            if where == "step" and number == 3:
                _stop()
            return step(trainer, batches, number, *rest)

        session.initialize, session.train_step = meet, third
    return train(ready_stages(arguments))


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)

"""What the ranks of the test of stragglers do: a run whose rank 1 sleeps in its forwards for some steps."""

from __future__ import annotations

import os
import time
from typing import Any

SLEEP_SECONDS = 0.5
"""Many times what a forward takes, on a busy machine too."""


def run(arguments: list[str], first: int, last: int) -> int:
    """`k3train train`; rank 1 is slow in steps `first` to `last`."""
    from k3train.model.decoder import LanguageModelChunk
    from k3train.train import session
    from k3train.train.loop import train
    from launch.compose import ready_stages

    step, forward, current = session.train_step, LanguageModelChunk.forward, 0

    def counted(trainer: Any, batches: Any, number: int, *rest: Any) -> Any:
        nonlocal current
        current = number
        return step(trainer, batches, number, *rest)

    def slow(self: LanguageModelChunk, *given: Any, **named: Any) -> Any:
        if os.environ["RANK"] == "1" and first <= current <= last:
            time.sleep(SLEEP_SECONDS)
        return forward(self, *given, **named)

    session.train_step = counted
    LanguageModelChunk.forward = slow  # type: ignore[method-assign]
    return train(ready_stages(arguments))

"""What the ranks of the tests of health checks do: look, with one thing wrong on the last rank, and meet."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def check(folder: str, wrong: str = "") -> list[Any]:
    """Both halves of the check as before a run; `wrong`: what the last rank finds otherwise.

    Returns:
        what was found, and what an `UnhealthyError` says.
    """
    from k3train.fault_config import FaultConfig
    from k3train.train import health

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    facts = health.of_rank(Path(folder), "cpu")
    if rank == ranks - 1 and wrong:
        facts = _spoil(wrong, facts, health)
    try:
        # Ranks share cores here: only what is spoilt is slow enough.
        return [health.meet(facts, torch.device("cpu"), FaultConfig(health_slow=0.01)), ""]
    except health.UnhealthyError as error:
        return [None, str(error) if error.alike else f"alone: {error}"]


def _spoil(wrong: str, facts: Any, health: Any) -> Any:
    from dataclasses import replace

    if wrong == "slow":
        return replace(facts, tflops=facts.tflops / 1e4)
    if wrong == "versions":
        return replace(facts, versions=facts.versions | {"torch": "1.0"})
    if wrong == "device":
        return replace(facts, device="another")
    if wrong == "clock":
        now = time.time
        health.time.time = lambda: now() - 60
        return facts
    assert wrong == "sums"
    reduce = dist.all_reduce

    def slips(values: torch.Tensor, *given: Any, **named: Any) -> Any:
        done = reduce(values, *given, **named)
        values[7] += 1
        return done

    dist.all_reduce = slips
    return facts


def train(arguments: list[str], full_on: int | None = None) -> int:
    """`k3train train`; the disk of rank `full_on` is full."""
    import errno

    from k3train.train import health
    from k3train.train.loop import train as start
    from launch.compose import ready_stages

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if os.environ["RANK"] == str(full_on):
        health.os.fsync = full
    return start(ready_stages(arguments))

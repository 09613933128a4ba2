"""Runs a benchmark's function on ranks of this machine, one core or one GPU each."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

from k3train.quiet import quiet
from tests.dist.launch import WorkersFailed, run_workers
from tests.parity.worker import leave

FREE, FEWEST = 0.9, 3
"""A step on a core that the rank had for this share of its operations' time counts as undisturbed; fewer of
them than this give no median."""


def run_ranks(target: str, ranks: int, arguments: dict[str, Any], *, timeout: float) -> Any:
    """What rank 0 returns from `target` ("module:function"), called on every rank with JSON arguments.

    Raises:
        SystemExit: a rank failed, or the ranks were not done after `timeout` seconds; none is left behind.
    """
    import torch

    devices = torch.cuda.device_count()
    if 0 < devices < ranks:
        raise SystemExit(f"{ranks} ranks need {ranks} GPUs, torch sees {devices}")
    # Ends through the finally that stops the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run_workers("benchmarks.common.ranks:work", ranks, {"of": target, **arguments}, timeout)[0]
    except WorkersFailed as error:
        raise SystemExit(str(error)) from error


def undisturbed(core_shares: Sequence[float]) -> list[int]:
    """Steps, or rounds, whose ranks had their cores nearly all the time; all of them if those are too few."""
    free = [index for index, share in enumerate(core_shares) if share >= FREE]
    return free if len(free) >= FEWEST else list(range(len(core_shares)))


def work(of: str, **arguments: Any) -> Any:
    """One rank's call; it need not leave its process groups."""
    import importlib

    quiet()
    module, _, function = of.partition(":")
    answer = getattr(importlib.import_module(module), function)(**arguments)
    leave()
    return answer

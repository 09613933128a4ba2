"""Runs a benchmark's function on ranks of this machine, one core or one GPU each."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from k3train.quiet import quiet
from tests.dist.launch import WorkersFailed, run_workers

FREE, FEWEST = 0.9, 3
"""A step on a core that the rank had for this share of its operations' time counts as undisturbed; fewer of
them than this give no median."""

PRODUCT_SIZES = 1 << 18
"""How many sizes of matrix products cuBLASLt is to remember; see `run_ranks`."""


def run_ranks(target: str, ranks: int, arguments: dict[str, Any], *, timeout: float) -> Any:
    """What rank 0 returns from `target` ("module:function"), called on every rank with JSON arguments.

    Every expert of every micro-batch has its own number of rows, and cuBLASLt spends 0.19 ms of the host's
    time on a product of a size that it does not remember (H200). Of the 8,192 that it remembers by default,
    one kind of step that is measured here can take more than half, so that kinds in turn would push each
    other's out. With room for all of them the GPU sets the pace. Training, whose loads never repeat, pays.

    Raises:
        SystemExit: a rank failed, or the ranks were not done after `timeout` seconds; none is left behind.
    """
    import torch

    devices = torch.cuda.device_count()
    if 0 < devices < ranks:
        raise SystemExit(f"{ranks} ranks need {ranks} GPUs, torch sees {devices}")
    os.environ.setdefault("CUBLASLT_HEURISTICS_CACHE_CAPACITY", str(PRODUCT_SIZES))
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
    """One rank's call."""
    import importlib

    quiet()
    module, _, function = of.partition(":")
    return getattr(importlib.import_module(module), function)(**arguments)

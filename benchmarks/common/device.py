"""Waiting for the device, timing steps on it, and giving a model's memory back, where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(step: Callable[[int], Any], steps: int, warmup: int) -> list[float]:
    """Seconds of each step behind the warm-up, device work included."""
    seconds = []
    for number in range(1, warmup + steps + 1):
        synchronize()
        start = time.perf_counter()
        step(number)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[warmup:]


def dismantle(chunks: list[Any]) -> None:
    """Break the circle of wrapper, gradient hooks and the last step's graph, which gc cannot see."""
    for chunk in chunks:
        vars(chunk).clear()

"""When each operation of a step ran on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .table import Op

Event = tuple[str, int, int, float, float]
"""(kind, chunk, micro-batch, start, end), seconds since the pipeline's ranks started the step together."""


class StepClock:
    """Measures one step. On a GPU the times are those of its compute stream: waits in front are gaps."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.synchronize()
        dist.barrier(group=group)
        self._start = self._now()
        self._marks: list[tuple[Op, Any, Any]] = []

    @contextmanager
    def measure(self, op: Op) -> Iterator[None]:
        """Time the block as `op`."""
        start = self._now()
        yield
        self._marks.append((op, start, self._now()))

    def events(self) -> list[Event]:
        """What was measured, in order; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return [
            (op.kind, op.chunk, op.microbatch, self._since(start), self._since(end))
            for op, start, end in self._marks
        ]

    def _now(self) -> Any:
        return _mark(self._cuda)

    def _since(self, mark: Any) -> float:
        if self._cuda:
            return float(self._start.elapsed_time(mark)) / 1e3
        return float(mark - self._start)


class BusyClock:
    """Adds up the time of operations, without the waits between them; no collective."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the block."""
        start = _mark(self._cuda)
        yield
        self._marks.append((start, _mark(self._cuda)))

    def take(self) -> float:
        """Seconds since the last call; waits for the last operation on the device."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return sum(end - start for start, end in marks)
        if marks:
            marks[-1][1].synchronize()
        return sum(float(start.elapsed_time(end)) for start, end in marks) / 1e3


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

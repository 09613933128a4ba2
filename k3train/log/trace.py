"""Wall time of the phases of a step: always summed for the metrics, and for a few steps kept as a trace.

The trace is in Chrome's format (https://ui.perfetto.dev opens it): complete events, one process a rank,
times in microseconds.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .metrics import replace_file


class Trace:
    """Times the phases of one rank."""

    def __init__(
        self,
        rank: int = 0,
        *,
        first_step: int = 1,
        last_step: int = 0,
        trace_steps: int = 0,
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        """Trace the first and the last `trace_steps` steps of `first_step..last_step`.

        `synchronize` waits for the device. It is called around the phases of traced steps only, so elsewhere
        a phase's time is what the host spent in it.
        """
        self._rank = rank
        self._traced = {
            *range(first_step, first_step + trace_steps),
            *range(max(first_step, last_step - trace_steps + 1), last_step + 1),
        }
        self._synchronize = synchronize or (lambda: None)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[dict[str, Any]] = []
        # Ranks on different hosts share the wall clock, not the counter that durations are measured with.
        self._epoch_us = time.time_ns() / 1e3 - time.perf_counter_ns() / 1e3

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Time the block as phase `name` of `step`. Phases may nest; each counts its whole time."""
        traced = step in self._traced
        if traced:
            self._synchronize()
        start = time.perf_counter_ns()
        try:
            yield
            if traced:
                self._synchronize()
        finally:
            duration = time.perf_counter_ns() - start
            self._seconds[name] += duration / 1e9
            if traced:
                self._events.append(self._event(name, step, start / 1e3, duration / 1e3))

    def spent(self, name: str) -> float:
        """Seconds spent in a phase since the last call of `phase_seconds`."""
        return self._seconds.get(name, 0.0)

    def phase_seconds(self) -> dict[str, float]:
        """Seconds spent in each phase since the last call, as metrics `time/<phase>`."""
        seconds = {f"time/{name}": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return seconds

    def events(self) -> list[dict[str, Any]]:
        """The trace events of this rank, plain data to be gathered."""
        name = {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
        order = {
            "name": "process_sort_index",
            "ph": "M",
            "pid": self._rank,
            "args": {"sort_index": self._rank},
        }
        return [name, order, *self._events]

    def _event(self, name: str, step: int, start_us: float, duration_us: float) -> dict[str, Any]:
        return {
            "name": name,
            "cat": "phase",
            "ph": "X",
            "ts": self._epoch_us + start_us,
            "dur": duration_us,
            "pid": self._rank,
            "tid": 0,
            "args": {"step": step},
        }


def write(path: str | os.PathLike[str], ranks: Iterable[list[dict[str, Any]]]) -> None:
    """Merge the `events()` of all ranks into one trace file whose time starts at 0. Raises OSError."""
    merged = [dict(event) for events in ranks for event in events]
    origin = min((event["ts"] for event in merged if "ts" in event), default=0.0)
    for event in merged:
        if "ts" in event:
            event["ts"] = round(event["ts"] - origin, 3)
            event["dur"] = round(event["dur"], 3)
    content = json.dumps({"traceEvents": merged, "displayTimeUnit": "ms"})
    replace_file(Path(path), content.encode())

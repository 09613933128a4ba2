"""One place that a training loop reports to; it never raises, whatever becomes of the sinks."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from ..config import Config
from . import events
from .metrics import MetricsLog

REPEAT_SECONDS = 60.0


class Sink(Protocol):
    """A place where metrics go. Either method may raise; the sink is then dropped."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def warn_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Tracker:
    """`metrics.jsonl`, `events.jsonl` and the optional sinks of one run."""

    def __init__(
        self,
        config: Config,
        run_dir: str | os.PathLike[str],
        *,
        resume_step: int = 0,
        writer: bool = True,
        warn: Callable[[str], None] = warn_on_stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open everything on the `writer` rank; on other ranks every call does nothing.

        Raises OSError when `metrics.jsonl` cannot be opened, the one failure worth stopping a start for.
        """
        self._run_dir = run_dir
        self._writer = writer
        self._warn = warn
        self._clock = clock
        self._complained = -REPEAT_SECONDS
        self._lines = MetricsLog(run_dir, resume_step=resume_step) if writer else None
        self._sinks: dict[str, Sink] = {}
        if writer:
            for name, build in sink_builders(config, run_dir, resume_step).items():
                self._guard(name, partial(self._open, name, build))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report one step, once: after the step, and before its checkpoint is complete."""
        if self._lines is None:
            return
        self._keep_going("metrics.jsonl", partial(self._lines.write, step, metrics))
        for name, sink in list(self._sinks.items()):
            self._guard(name, partial(sink.log, step, metrics))

    def event(self, step: int, kind: str, text: str) -> None:
        """Record that something happened; `kind` is a word such as resumed, skipped, fallback or saved."""
        if self._writer:
            self._keep_going("events.jsonl", partial(events.append, self._run_dir, step, kind, text))

    def close(self) -> None:
        """Close every sink; safe to call twice."""
        for name, sink in list(self._sinks.items()):
            self._guard(name, sink.close)
        self._sinks.clear()
        if self._lines is not None:
            self._keep_going("metrics.jsonl", self._lines.close)
            self._lines = None

    def _open(self, name: str, build: Callable[[], Sink]) -> None:
        self._sinks[name] = build()

    def _guard(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self._sinks.pop(name, None)
            self._warn(f"{name} is off for the rest of this run: {one_line(error)}")

    def _keep_going(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, TypeError, ValueError) as error:
            now = self._clock()
            if now - self._complained >= REPEAT_SECONDS:
                self._complained = now
                self._warn(f"{name} cannot be written, training goes on: {one_line(error)}")


def sink_builders(
    config: Config, run_dir: str | os.PathLike[str], resume_step: int
) -> dict[str, Callable[[], Sink]]:
    """How to open each optional sink that the configuration asks for. Their packages load on use."""
    builders: dict[str, Callable[[], Sink]] = {}
    if config.log.tensorboard:

        def tensorboard() -> Sink:
            from .tensorboard import TensorBoardSink

            return TensorBoardSink(run_dir, resume_step=resume_step)

        builders["tensorboard"] = tensorboard
    if config.log.wandb != "disabled":

        def wandb() -> Sink:
            from .wandb import WandbSink

            return WandbSink(run_dir, config.log, name=config.run.name, config=dataclasses.asdict(config))

        builders["wandb"] = wandb
    return builders


def one_line(error: BaseException) -> str:
    """An exception's text without its line breaks, or its type when it has none."""
    return " ".join(str(error).split()) or type(error).__name__

"""One place that a training loop reports to; it never raises, whatever becomes of the sinks."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..config import Config
from ..redaction import redact
from . import events
from .alerts import Alert, Alerts
from .metrics import MetricsLog

REPEAT_SECONDS = 60.0


class Sink(Protocol):
    """A place where metrics go. Either method may raise; the sink is then dropped."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Listener(Protocol):
    """A sink that also takes alerts. It may raise too."""

    def alert(self, step: int, alert: Alert) -> None: ...


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
        """Open everything on the `writer` rank. Of the others the first one on a node serves its own metrics
        to Prometheus where that is asked for, and writes nothing; the rest do nothing.

        Raises OSError when `metrics.jsonl` cannot be opened, the one failure worth stopping a start for.
        """
        self._run_dir = run_dir
        self._writer = writer
        self._warn = warn if writer else warn_on_stderr
        self._clock = clock
        self._complained = -REPEAT_SECONDS
        self._lines = MetricsLog(run_dir, resume_step=resume_step) if writer else None
        self._sinks: dict[str, Sink] = {}
        self._alerts: Alerts | None = None
        if writer:
            every = config.checkpoint.every > 0
            self._alerts = Alerts(config.log.alerts, Path(run_dir), checkpoints=every)
        builders = sink_builders(config, run_dir, resume_step, warn) if writer else {}
        for name, build in (builders | exporter_builders(config, self._alerts)).items():
            self._guard(name, partial(self._open, name, build))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report one step, once: after the step, and before its checkpoint is complete."""
        if self._lines is not None:
            self._keep_going("metrics.jsonl", partial(self._lines.write, step, metrics))
        for alert in self._alerts.observe(metrics) if self._alerts is not None else ():
            self._tell(step, alert)
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

    def _tell(self, step: int, alert: Alert) -> None:
        """Pass an alert on: the history, the terminal, and the sinks that take it."""
        text = f"{alert.title}: {alert.text}"
        self.event(step, "alert", text)
        self._warn(f"alert at step {step}: {text}")
        for name, sink in list(self._sinks.items()):
            if isinstance(sink, Listener):
                self._guard(name, partial(sink.alert, step, alert))

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
    config: Config, run_dir: str | os.PathLike[str], resume_step: int, warn: Callable[[str], None]
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
    if config.log.alerts.webhook_env is not None:
        variable = config.log.alerts.webhook_env

        def webhook() -> Sink:
            from .webhook import Webhook

            return Webhook(variable, config.run.name, warn)

        builders["webhook"] = webhook
    return builders


def exporter_builders(config: Config, alerts: Alerts | None) -> dict[str, Callable[[], Sink]]:
    """How to serve this rank's metrics, where it is the first of its node and that is asked for.

    `alerts`: those of the run, on the rank that judges them.
    """
    log = config.log
    if not log.prometheus_port or os.environ.get("LOCAL_RANK", "0") != "0":
        return {}

    def prometheus() -> Sink:
        from .prometheus import Exporter

        labels = {"run": config.run.name, "rank": os.environ.get("RANK", "0")}
        if alerts is None:
            return Exporter(log.prometheus_host, log.prometheus_port, labels)
        state = lambda: (alerts.status(), alerts.active)  # noqa: E731
        return Exporter(log.prometheus_host, log.prometheus_port, labels, state)

    return {"prometheus": prometheus}


def one_line(error: BaseException) -> str:
    """An exception's text without its line breaks and secrets, or its type when it has none."""
    return redact(" ".join(str(error).split())) or type(error).__name__

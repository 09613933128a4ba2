"""Weights & Biases, at arm's length: everything that touches it runs on a daemon thread.

Training only ever puts a record on a bounded queue. What goes wrong on the thread (no package, no login, no
network, a hang) surfaces as one RuntimeError from `log` or `close`, upon which the tracker drops the sink.
"""

from __future__ import annotations

import importlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import LogConfig
from .alerts import Alert
from .panels import PANELS

ID_FILE = "wandb_id"
QUEUE_SIZE = 10_000


class WandbSink:
    """Sends records to one wandb run, the same one after a resume."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        log: LogConfig,
        *,
        name: str,
        config: Mapping[str, Any],
        init_seconds: float = 30.0,
        close_seconds: float = 30.0,
    ) -> None:
        """Start the thread and return at once. `log.wandb` is online or offline; `config` is uploaded."""
        self._init_seconds = init_seconds
        self._close_seconds = close_seconds
        self._queue: queue.Queue[Callable[[Any], object] | None] = queue.Queue(QUEUE_SIZE)
        self._failure: str | None = None
        self._ready = threading.Event()
        self._started = time.monotonic()
        options = {
            "project": log.wandb_project,
            "entity": log.wandb_entity,
            "mode": log.wandb,
            "name": name,
            "id": run_id(run_dir),
            "resume": "allow",
            "dir": os.fspath(run_dir),
            "config": dict(config),
        }
        self._thread = threading.Thread(target=self._work, args=(options,), name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue one record. Raises RuntimeError once wandb has failed, hung or fallen far behind."""
        record = {"step": step, **metrics}
        # wandb refuses steps that the killed run had already sent; they are the same numbers.
        self._put(lambda run: run.log(record, step=step))

    def alert(self, step: int, alert: Alert) -> None:
        """Queue one alert, which wandb passes on to Slack or by mail as its user has set. Raises as `log`."""
        self._put(lambda run: run.alert(title=alert.title, text=f"step {step}: {alert.text}", level="WARN"))

    def _put(self, action: Callable[[Any], object]) -> None:
        self._check()
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            raise RuntimeError(f"{QUEUE_SIZE:,} records are waiting to be sent") from None

    def close(self) -> None:
        """Send what is queued, for at most `close_seconds`. Raises RuntimeError if that fails."""
        self._check()
        deadline = time.monotonic() + self._close_seconds
        try:
            self._queue.put(None, timeout=self._close_seconds)
        except queue.Full:
            raise RuntimeError("it did not finish sending in time") from None
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise RuntimeError(f"it did not finish sending within {self._close_seconds:g} s")
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if not self._ready.is_set() and time.monotonic() - self._started > self._init_seconds:
            raise RuntimeError(f"it did not start within {self._init_seconds:g} s")

    def _work(self, options: dict[str, Any]) -> None:
        # wandb.init may call sys.exit; nothing that happens here may reach the training process.
        try:
            run = start(options, self._init_seconds)
            self._ready.set()
            while (action := self._queue.get()) is not None:
                action(run)
            run.finish()
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"


def start(options: dict[str, Any], init_seconds: float) -> Any:
    """Import wandb, open the run and declare its metrics."""
    wandb = importlib.import_module("wandb")
    settings = wandb.Settings(console="off", silent=True, init_timeout=init_seconds)
    # Silence must hold for the whole process, or a missing login would ask for one at the terminal.
    wandb.setup(settings=wandb.Settings(silent=True))
    run = wandb.init(settings=settings, **options)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    for panel in PANELS:
        for pattern in panel.metrics:
            # wandb takes a star at the end of a name only, which is where the panels have theirs.
            run.define_metric(pattern, step_metric="step", summary=panel.summary)
    return run


def run_id(run_dir: str | os.PathLike[str]) -> str:
    """The run's wandb id, made up and kept in the run directory the first time. Raises OSError."""
    path = Path(run_dir) / ID_FILE
    if path.exists() and (known := path.read_text().strip()):
        return known
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = secrets.token_hex(4)
    path.write_text(fresh + "\n")
    return fresh

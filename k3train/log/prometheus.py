"""`/metrics` of one node in Prometheus' text format (version 0.0.4), from the standard library alone.

The step puts a snapshot in place; a scrape turns the newest one into text on its own thread.
"""

from __future__ import annotations

import errno
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from numbers import Real
from typing import Any, NamedTuple

from .panels import PANELS, as_regex

PREFIX = "k3train_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GIB = 2**30
OWN = {
    "step": "Last step that was logged",
    "last_step_timestamp_seconds": "When it was logged, seconds since 1970",
    "checkpoint_age_seconds": "Age of the newest complete checkpoint, or of the run's start without one",
    "disk_free_bytes": "Free space of the file system of run.dir",
    "alert": "1 while the alert is on",
}
"""Families that are no metric of metrics.jsonl, and what they are."""


class Sample(NamedTuple):
    """Where a metric of metrics.jsonl is found."""

    family: str
    """With the prefix."""
    labels: dict[str, str]
    factor: float = 1.0
    """From the metric's unit to the family's."""


def sample_of(metric: str) -> Sample:
    """The family and labels of a metric, or of a panel's pattern, whose star then stands for a label."""
    head, _, tail = metric.rpartition("/")
    if head == "time":
        return Sample(f"{PREFIX}phase_seconds", {"phase": tail})
    if head == "memory":
        return Sample(f"{PREFIX}memory_bytes", {"kind": tail.removesuffix("_gib")}, GIB)
    if head.startswith("moe/"):
        return Sample(PREFIX + plain_name(head), {"layer": tail.removeprefix("layer_")})
    return Sample(PREFIX + plain_name(metric), {})


def plain_name(text: str) -> str:
    """Text as a part of a name, which has letters, digits and _ only."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", text)


def meaning(metric: str) -> str:
    """Help of a family: the title and unit of the panel that shows the metric."""
    for panel in PANELS:
        if any(re.fullmatch(as_regex(pattern), metric) for pattern in panel.metrics):
            unit = "bytes" if panel.unit == "GiB" else panel.unit
            return f"{panel.title}, {unit}" if unit else panel.title
    return f"{metric} of metrics.jsonl"


def number_text(value: float) -> str:
    """A value as the format has it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def escaped(text: str, quotes: bool = True) -> str:
    """Backslash and line feed, and in values of labels the quote, as the format wants them."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


class Page:
    """Collects samples by family and writes them in order, each family once."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._families: dict[str, tuple[str, list[str]]] = {}

    def add(self, family: str, help_text: str, value: float, labels: Mapping[str, str]) -> None:
        """One sample; the first help of a family counts."""
        pairs = ",".join(f'{name}="{escaped(text)}"' for name, text in (self._labels | dict(labels)).items())
        lines = self._families.setdefault(family, (help_text, []))[1]
        lines.append(f"{family}{{{pairs}}} {number_text(value)}\n")

    def text(self) -> str:
        """The whole page."""
        parts = []
        for family, (help_text, lines) in self._families.items():
            parts.append(f"# HELP {family} {escaped(help_text, quotes=False)}\n# TYPE {family} gauge\n")
            parts += lines
        return "".join(parts)


def render(
    step: int,
    metrics: Mapping[str, Any],
    *,
    labels: Mapping[str, str],
    at: float,
    status: Mapping[str, float],
    alerts: Mapping[str, bool],
) -> str:
    """The page of one snapshot; what is no number is left out, as in TensorBoard."""
    page = Page(labels)
    own = {"step": float(step), "last_step_timestamp_seconds": at, **status}
    for name, value in own.items():
        page.add(PREFIX + name, OWN[name], value, {})
    for rule, active in alerts.items():
        page.add(f"{PREFIX}alert", OWN["alert"], float(active), {"alert": rule})
    for metric, value in metrics.items():
        if metric != "step" and isinstance(value, Real) and not isinstance(value, bool):
            family, found, factor = sample_of(metric)
            page.add(family, meaning(metric), float(value) * factor, found)
    return page.text()


class Exporter:
    """A sink that serves what it was given last, until it is closed."""

    def __init__(
        self,
        host: str,
        port: int,
        labels: Mapping[str, str],
        state: Callable[[], tuple[Mapping[str, float], Mapping[str, bool]]] = lambda: ({}, {}),
    ) -> None:
        """Listen at once; port 0 takes any that is free.

        Args:
            labels: of every sample.
            state: status and alerts of `render`, asked at each `log`.

        Raises RuntimeError, which names the key to change, where the address cannot be had.
        """
        self._labels, self._state = dict(labels), state
        self._seen: dict[str, Any] = {}
        self._text: Callable[[], str] = lambda: ""
        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise RuntimeError(refusal(host, port, error)) from error
        self._server.page = lambda: self._text()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._server.server_address[1])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Put a snapshot in place. Metrics that are not in every line, as val_loss, keep their last value."""
        self._seen |= metrics
        status, alerts = self._state()
        seen, at, labels = dict(self._seen), time.time(), self._labels
        self._text = lambda: render(
            step, seen, labels=labels, at=at, status=dict(status), alerts=dict(alerts)
        )

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class Server(ThreadingHTTPServer):
    """Threads of requests end with the process."""

    daemon_threads = True
    block_on_close = False
    page: Callable[[], str]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is no news."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics."""

    timeout = 10
    server: Server
    server_version, sys_version = "k3train", ""

    def do_GET(self) -> None:
        """The newest snapshot."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = self.server.page().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Scrapes are not reported."""


def refusal(host: str, port: int, error: OSError) -> str:
    """One line about an address that cannot be had."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is taken, perhaps by another run on this node; give each run its own "
            "log.prometheus_port"
        )
    return f"{host}:{port} cannot be listened at ({error.strerror or error}); see log.prometheus_host"

"""Alerts as JSON to a URL, on a daemon thread: training never waits for a server.

The URL is often a secret. It comes from an environment variable and is in no message of this module.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from .alerts import Alert

SECONDS = 10.0
WAITING = 100


class Webhook:
    """A sink that posts alerts, at most `WAITING` of them behind each other."""

    def __init__(self, variable: str, run: str, warn: Callable[[str], None]) -> None:
        """Raises RuntimeError where the environment variable `variable` holds no http or https URL.

        `run` names the run to the receiver.
        """
        url = os.environ.get(variable, "")
        if urlsplit(url).scheme not in ("http", "https"):
            raise RuntimeError(f"the environment variable {variable} holds no http(s) URL")
        self._url, self._run, self._warn = url, run, warn
        self._failures: deque[str] = deque(maxlen=1)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics are not sent; here the caller's thread tells what went wrong on the other one."""
        if self._failures:
            self._warn(f"an alert was not delivered: {self._failures.popleft()}")

    def alert(self, step: int, alert: Alert) -> None:
        """Queue one alert. Raises RuntimeError when too many wait."""
        text = f"{self._run}, step {step}: {alert.title}: {alert.text}"
        record = {"run": self._run, "step": step, "alert": alert.rule, "over": alert.over, "text": text}
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            raise RuntimeError(f"{WAITING} alerts are waiting to be sent") from None

    def close(self) -> None:
        """Send what is queued, for at most `SECONDS`."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(SECONDS)
        self.log(0, {})

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                post(self._url, record)
            except Exception as error:
                self._failures.append(reason(error))


def post(url: str, record: Mapping[str, Any]) -> None:
    """One POST of JSON. Raises what urllib raises, its messages may hold the URL."""
    body = json.dumps(record).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS):
        pass


def reason(error: Exception) -> str:
    """What went wrong, without the URL."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        return error.reason.strerror or type(error.reason).__name__
    return type(error).__name__

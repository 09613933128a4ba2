"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP as a request to save and stop at the end of the step."""

from __future__ import annotations

import signal
from types import FrameType


def stop_signals() -> list[signal.Signals]:
    """Those that ask for a stop; without SIGHUP, the lost terminal, where `nohup` has it ignored."""
    asked = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    return asked if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*asked, signal.SIGHUP]


class StopRequest:
    """Remembers the first stop signal; a second SIGINT interrupts at once, as a person would expect."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous = {number: signal.signal(number, self._remember) for number in stop_signals()}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number).name

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

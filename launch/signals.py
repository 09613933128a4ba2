"""Stop signals on their way to the training loop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

from k3train.train.signals import stop_signals

RETRY_SECONDS = 0.3


def redeliver(number: int, frame: FrameType | None = None) -> None:
    """Send this process the signal again a little later, by when its real handler may be there."""
    timer = threading.Timer(RETRY_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def defer_until_loop() -> None:
    """Hold stop signals back while modules load; the training loop installs its own handlers over these."""
    for number in stop_signals():
        signal.signal(number, redeliver)


def follow_parent(number: signal.Signals) -> None:
    """Have the kernel send `number` when the process that started this one dies. Linux only; else nothing."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number), 0, 0, 0)

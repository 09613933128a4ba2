"""Ends the ranks of an agent that is gone, however it went, and those that are stopped too.

An agent that is killed can do nothing any more, and a stopped rank hears no signal. So a small process of its
own, in a session of its own, holds one end of a pipe: when the other end is closed by whoever held it, it
ends all processes that carry a mark in their environment, which what they start inherits. It imports nothing
of this package and is run as a file, which takes 20 ms. Linux only; elsewhere it finds nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SAVE_SECONDS = 600.0
"""For ranks whose agent is gone to save and end, before they are killed."""
LOOK_SECONDS = 0.2


class Guard:
    """Ends what carries `name=folder` in its environment, and removes `folder`, when this process is gone.

    Args:
        grace: seconds from a stop signal to SIGKILL; without any there is no stop signal.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str], grace: float = SAVE_SECONDS) -> None:
        ours, self._held = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(ours), name, os.fspath(folder), str(grace)],
            pass_fds=(ours,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={key: value for key, value in os.environ.items() if key != name},
        )
        os.close(ours)

    def close(self) -> None:
        """Have it done now, what is left of it; goes on after a second if that takes longer."""
        os.close(self._held)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)


def end(name: str, folder: str, grace: float) -> None:
    """End what carries the mark: asked to save for `grace` seconds, then killed; until nothing is left."""
    deadline = time.monotonic() + grace
    asked: set[int] = set()
    while left := marked(name, folder):
        late = time.monotonic() >= deadline
        # What a rank has started itself is the rank's to end: its data come from there until it has saved.
        for pid in left if late else heads(left) - asked:
            _send(pid, signal.SIGKILL if late else signal.SIGTERM)
            asked.add(pid)
        for pid in left:
            _send(pid, signal.SIGCONT)
        time.sleep(LOOK_SECONDS)


def marked(name: str, folder: str) -> set[int]:
    """Processes, other than this one, that carry `name=folder` in their environment."""
    mark, found = f"{name}={folder}".encode(), set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0") and _state(path) != "Z":
                found.add(int(path.name))
    return found - {os.getpid()}


def heads(pids: set[int]) -> set[int]:
    """Those of `pids` that none of the others has started."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if int(_fields(Path(f"/proc/{pid}"))[1]) not in pids:
                found.add(pid)
    return found


def _state(path: Path) -> str:
    return _fields(path)[0]


def _fields(path: Path) -> list[str]:
    """Of /proc/PID/stat, from the state on; the name before it may hold anything."""
    return (path / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def main(arguments: list[str]) -> None:
    """Wait until nobody holds the other end of the pipe, and end what is left."""
    pipe, name, folder, grace = arguments
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.read(int(pipe), 1)
    end(name, folder, float(grace))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])

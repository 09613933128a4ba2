"""A process that has imported everything once and forks the workers of distributed tests from itself.

Importing torch and megatron-core takes seconds of each worker otherwise, most of a short test. It talks by
lines of JSON: a request for a worker is answered with its process id, `{"ended": true}` with the exit codes
so far. It has one thread and no CUDA, so that its forks are sound, and ends its workers when it is left
alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]

PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>."""


class Worker:
    """A forked process, as far as `subprocess.Popen` is used of it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None."""
        return self._nursery.ended().get(self.pid)

    def wait(self, timeout: float = 60) -> int:
        """The exit code, when there is one. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
            time.sleep(0.01)
        return code


class Nursery:
    """The tests' end of the line."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.nursery"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path_of(os.environ)},
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ended: dict[int, int] = {}
        atexit.register(self._close)

    def start(self, target: str, args: str, folder: Path, rank: int, environment: dict[str, str]) -> Worker:
        """Fork a worker; see `launch.start_workers`."""
        answer = self._ask(
            {"target": target, "args": args, "folder": str(folder), "rank": rank, "environment": environment}
        )
        # Numbers of processes come again: this one's exit code is not that of an earlier worker.
        self._ended.pop(int(answer["pid"]), None)
        return Worker(self, int(answer["pid"]))

    def ended(self) -> dict[int, int]:
        """Exit codes of the workers that have ended, by process id."""
        for pid, code in self._ask({"ended": True}).items():
            self._ended[int(pid)] = code
        return self._ended

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def path_of(environment: Any) -> str:
    """PYTHONPATH with this repository before all else."""
    return os.pathsep.join([str(REPOSITORY), environment.get("PYTHONPATH", "")])


def serve() -> None:
    """Fork workers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    _prepare()
    living: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            answer: dict[str, Any] = {str(pid): code for pid, code in _reap(living)}
        else:
            pid = os.fork()
            if pid == 0:
                answers.close()
                _become(request)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            living.add(pid)
            answer = {"pid": pid}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _prepare() -> None:
    from parallel.cpu import enable_cpu

    enable_cpu()
    import tests.dist.launch  # noqa: F401


def _reap(living: set[int]) -> list[tuple[int, int]]:
    found = []
    for pid in sorted(living):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            living.discard(pid)
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _become(request: dict[str, Any]) -> NoReturn:
    """Be a worker; never returns."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _die_with_parent()
        folder = request["folder"]
        output = os.open(f"{folder}/{request['rank']}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["environment"])
        from tests.dist.launch import work

        work(request["target"], request["args"], folder)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Where the nursery is killed before it can end its workers (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve()

"""torchrun with signals that save and exit statuses that mean something.

`python -m launch.torchrun OPTIONS -m launch.train OVERRIDES` takes torchrun's own options. It differs so:
SIGTERM, SIGINT and SIGUSR1 go to the workers, which save and end by themselves however long that takes; what
workers refuse is one line and exit status 2; when a worker dies or hangs all are started again, as `restarts`
decides, in one line instead of a traceback of the agent's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from k3train.exit_status import DIVERGED, FAILED, HUNG, INTERRUPTED, REFUSED, UNHEALTHY
from k3train.train.signals import STOP_SIGNALS

from . import status
from .restarts import Restarts, first_failure
from .signals import redeliver

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

BY_WEIGHT = (REFUSED, DIVERGED, UNHEALTHY, HUNG, INTERRUPTED)
"""Statuses of ranks that the agent ends with, the first that any of them has."""


def run_standalone(ranks: int, threads: int, overrides: Sequence[str]) -> int:
    """Run `launch.train` on `ranks` ranks of this machine; the exit status."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    options = ["--standalone", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    return run([*options, "-m", "launch.train", *overrides])


def run(arguments: Sequence[str]) -> int:
    """Be torchrun's agent for `arguments`; the exit status, of `k3train.exit_status`."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from . import agent

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # SIGHUP stays torchrun's: a lost terminal stops the workers without a word.
    parsed = torchrun.parse_args(["--signals-to-handle", "SIGHUP", *arguments])
    workers = torchrun.determine_local_world_size(parsed.nproc_per_node)
    with tempfile.TemporaryDirectory(prefix="k3train-") as folder:
        restarts = Restarts(arguments, parsed, folder)
        with _forwarding(folder, workers, restarts):
            try:
                agent.run(parsed, restarts.again, restarts.starting)
            except ChildFailedError as error:
                return _explain(error.failures, status.read(folder))
            return max((worker.code or 0 for worker in status.read(folder)), default=0)


@contextmanager
def _forwarding(folder: str, workers: int, restarts: Restarts) -> Iterator[None]:
    """Send stop signals on to the workers once all of them have started."""

    def forward(number: int, frame: FrameType | None) -> None:
        restarts.stopping = True
        started = status.read(folder)
        if len(started) < workers:
            redeliver(number)
        for worker in started if len(started) == workers else ():
            if worker.code is None:
                _signal(worker.pid, number)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    os.environ[status.FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        del os.environ[status.FOLDER_VARIABLE]
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _explain(failures: dict[int, ProcessFailure], workers: list[status.WorkerStatus]) -> int:
    """The exit status of ranks that failed; a line on standard error where they have not said why."""
    told = [worker for worker in workers if worker.code == REFUSED]
    codes = {failure.exitcode for failure in failures.values()} | {worker.code for worker in workers}
    known = next((code for code in BY_WEIGHT if code in codes), None)
    if known == REFUSED:
        print(f"k3train: {told[0].message if told else 'refused; see above'}", file=sys.stderr)
    if known is not None:
        return known
    print(
        f"k3train: {first_failure(failures)}; the same command resumes from the last checkpoint",
        file=sys.stderr,
    )
    return FAILED


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

"""torchrun with signals that save and exit statuses that mean something.

`python -m launch.torchrun OPTIONS -m launch.train OVERRIDES` takes torchrun's own options. It differs so:
SIGTERM, SIGINT, SIGUSR1 and SIGHUP go to the workers, which save and end by themselves however long that
takes; what workers refuse is one line and exit status 2; when a worker dies or hangs all are started again,
as `restarts` decides, in one line instead of a traceback of the agent's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from k3train.exit_status import DIVERGED, FAILED, HUNG, INTERRUPTED, REFUSED, SAVED, UNHEALTHY
from k3train.train.signals import stop_signals

from . import status
from .modes import keep_from_others
from .restarts import Restarts, first_failure
from .signals import redeliver

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

PATIENCE = 3
"""Ctrl-C so often ends ranks that hear nothing."""
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
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from . import agent

    keep_from_others()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Of the signals SIGQUIT stays torchrun's, which ends ranks without a save.
    parsed = torchrun.parse_args(["--signals-to-handle", "SIGQUIT", *arguments])
    workers = torchrun.determine_local_world_size(parsed.nproc_per_node)
    with tempfile.TemporaryDirectory(prefix="k3train-") as folder:
        # torchrun would make one of its own, and leave it.
        parsed.log_dir = parsed.log_dir or folder
        restarts = Restarts(arguments, parsed, folder)
        # The guard takes the folder with it: it is closed when all is read.
        with closing(restarts):
            try:
                with _forwarding(folder, workers, restarts):
                    agent.run(parsed, restarts)
            except ChildFailedError as error:
                return _explain(error.failures, status.read(folder))
            except agent.LonelyError as error:
                print(f"k3train: {error}; the same command resumes from the last checkpoint", file=sys.stderr)
                return FAILED
            except SignalException as error:
                name = signal.Signals(error.sigval).name
                print(f"k3train: {name}: ended; nothing was saved since the last checkpoint", file=sys.stderr)
                return INTERRUPTED
            except Stopped as stop:
                print(f"k3train: {stop} while this node waited for the others", file=sys.stderr)
                return SAVED
            return max((worker.code or 0 for worker in status.read(folder)), default=0)


class Stopped(BaseException):
    """A stop signal came while no rank ran: what there is is saved."""


@contextmanager
def _forwarding(folder: str, workers: int, restarts: Restarts) -> Iterator[None]:
    """Send stop signals on to the workers once all of them have started."""
    interrupts = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        restarts.stopping = True
        if restarts.alone:
            raise Stopped(signal.Signals(number).name)
        started = status.read(folder)
        if len(started) < workers:
            redeliver(number)
        for worker in started if len(started) == workers else ():
            if worker.code is None:
                _signal(worker.pid, number)
        for pid in restarts.ranks.values():
            # One that is stopped hears no other signal; and who asks three times wants no answer.
            _signal(pid, signal.SIGKILL if interrupts >= PATIENCE else signal.SIGCONT)

    before = {number: signal.signal(number, forward) for number in stop_signals()}
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

"""torchrun with signals that save and exit statuses that mean something.

`python -m launch.torchrun OPTIONS -m launch.train OVERRIDES` takes torchrun's own options. It differs so:
SIGTERM, SIGINT and SIGUSR1 go to the workers, which save and end by themselves however long that takes; what
workers refuse is one line and exit status 2; a worker that dies is one line, not a traceback of the agent's.
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

from k3train.train.signals import STOP_SIGNALS

from . import status
from .signals import redeliver


def run_standalone(ranks: int, threads: int, overrides: Sequence[str]) -> int:
    """Run `launch.train` on `ranks` ranks of this machine; the exit status."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    options = ["--standalone", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    return run([*options, "-m", "launch.train", *overrides])


def run(arguments: Sequence[str]) -> int:
    """Be torchrun's agent for `arguments`; 0 done or saved, 2 refused by the workers, 1 anything else."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # SIGHUP stays torchrun's: a lost terminal stops the workers without a word.
    parsed = torchrun.parse_args(["--signals-to-handle", "SIGHUP", *arguments])
    workers = torchrun.determine_local_world_size(parsed.nproc_per_node)
    with tempfile.TemporaryDirectory(prefix="k3train-") as folder, _forwarding(folder, workers):
        try:
            torchrun.run(parsed)
        except ChildFailedError as error:
            return _explain(error, status.read(folder))
        return max((worker.code or 0 for worker in status.read(folder)), default=0)


@contextmanager
def _forwarding(folder: str, workers: int) -> Iterator[None]:
    """Send stop signals on to the workers once all of them have started."""

    def forward(number: int, frame: FrameType | None) -> None:
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


def _explain(error: object, workers: list[status.WorkerStatus]) -> int:
    refused = [worker for worker in workers if worker.code == 2]
    if refused:
        print(f"k3train: {refused[0].message}", file=sys.stderr)
        return 2
    rank, failure = error.get_first_failure()  # type: ignore[attr-defined]
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"
    print(f"k3train: rank {rank} {how}; the same command resumes from the last checkpoint", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

"""`k3train train`, and `python -m launch.train`, which is the same on one rank or under torchrun."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence

from k3train.config import Config
from k3train.errors import UserError
from k3train.exit_status import DONE, FAILED, REFUSED, SAVED
from k3train.redaction import redact

from . import status
from .compose import ready_stages
from .modes import keep_from_others
from .signals import defer_until_loop, follow_parent


def main(arguments: Sequence[str]) -> int:
    """The front door: refuse early, then train here or start as many ranks as the layout needs."""
    if {"-m", "--multirun"} & set(arguments):
        from .multirun import sweep

        return sweep([argument for argument in arguments if argument not in ("-m", "--multirun")])
    stages = ready_stages(arguments)
    config = stages[0]
    cluster = config.cluster
    assert cluster.ranks_per_node is not None
    defer_until_loop()
    if "RANK" in os.environ or cluster.nodes * cluster.ranks_per_node == 1:
        return _train(stages, arguments)
    if cluster.nodes > 1:
        raise UserError(
            f"cluster.nodes={cluster.nodes}: `k3train train` starts one machine; "
            f"use `k3train launch slurm` or torchrun --nnodes {cluster.nodes} -m launch.train"
        )
    from .torchrun import run_standalone

    return run_standalone(cluster.ranks_per_node, config.run.threads, arguments)


def worker(arguments: Sequence[str]) -> int:
    """One rank under torchrun: train, and leave the agent a note of how it ended."""
    rank = int(os.environ["RANK"])
    keep_from_others()
    defer_until_loop()
    heard = status.write(status.WorkerStatus(rank, os.getpid()))
    if heard:
        follow_parent(signal.SIGTERM)
    message = ""
    counts = (os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get(status.STARTS_VARIABLE, "1"))
    if counts[0] != "0" or counts[1] != "1":
        # Started again, it goes on with what it has left, a run that was to begin afresh too.
        arguments = [*arguments, "run.resume=true"]
    try:
        code = _train(ready_stages(arguments), arguments)
    except UserError as error:
        code, message = REFUSED, redact(str(error))
        if not heard:
            print(f"k3train: {message}", file=sys.stderr)
    except Exception:
        code = FAILED
        traceback.print_exc()
    status.write(status.WorkerStatus(rank, os.getpid(), code, message))
    # Any other status is a failure to torchrun, which would end the ranks that are not through yet.
    return DONE if code == SAVED else code


def _train(stages: list[Config], arguments: Sequence[str]) -> int:
    os.environ["OMP_NUM_THREADS"] = str(stages[0].run.threads)
    from k3train.train.loop import train

    return train(stages, lambda done: ready_stages(arguments, done=done))


if __name__ == "__main__":
    from .cli import run_verb

    sys.exit(worker(sys.argv[1:]) if "RANK" in os.environ else run_verb("train", sys.argv[1:]))

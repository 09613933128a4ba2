"""torchrun's agent in a pod: `python -m launch.pod OPTIONS -m launch.train OVERRIDES`.

Takes the arguments of `launch.torchrun` and ends with what the training operator acts on: it starts a pod
anew on statuses from 128 and gives the job up on lower ones (`IsRetryableExitCode` in
kubeflow/training-operator), and a master that ends with 0 makes the whole job a success.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from k3train.exit_status import DONE, FINAL, SAVED

from . import torchrun
from .compose import compose
from .finished import is_finished

STOPPED = 143
"""Saved before the last step: what a process killed by SIGTERM ends with."""
FAILED = 138
"""Anything that a new attempt may not meet again: a lost rank, a hang, a machine that failed its checks."""
ENTRY = "launch.train"


def main(arguments: Sequence[str]) -> int:
    """0 complete; a final status as it is; STOPPED or FAILED."""
    code = torchrun.run(arguments)
    if code == DONE:
        overrides = arguments[arguments.index(ENTRY) + 1 :]
        return DONE if is_finished(compose(overrides)) else STOPPED
    if code == SAVED:
        return STOPPED
    return code if code in FINAL else FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

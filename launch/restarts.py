"""Whether ranks that have failed are started again, and how often; imports torch for types alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3train.checkpoint.folders import available
from k3train.config import Config
from k3train.errors import UserError
from k3train.exit_status import FINAL, HUNG, INTERRUPTED, UNHEALTHY
from k3train.log import events

from . import guard, status
from .start_watch import StartWatch

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

ENTRY = "launch.train"
TOGETHER = 2
"""Seconds; less than the agent leaves ranks to end."""
STAYS = {*FINAL, UNHEALTHY, INTERRUPTED}
"""On this machine the same start would end the same way, or a person has stopped it."""


class Restarts:
    """Counts the restarts in a row that have brought no new checkpoint."""

    def __init__(self, arguments: Sequence[str], options: Namespace, folder: str) -> None:
        """`arguments`: torchrun's, parsed as `options`; `folder`: where the workers tell how they ended."""
        self.arguments, self.options, self.folder = list(arguments), options, folder
        self.stopping = False
        """A stop signal has come: what fails now is not started again."""
        self.alone = True
        """No rank runs here: this node waits for the others."""
        self._in_a_row, self._newest, self._starts = 0, -1, 0
        self.ranks: dict[int, int] = {}
        """Process ids of this node's, by rank."""
        self._guard: guard.Guard | None = None
        self._watch: StartWatch | None = None

    def meeting(self) -> None:
        """This node waits for the others, and has no ranks."""
        self.alone = True

    def again(self, result: RunResult) -> bool:
        """Whether to start all ranks again; says so."""
        codes: set[int | None] = {failure.exitcode for failure in result.failures.values()}
        codes |= {worker.code for worker in status.read(self.folder)}
        if self.stopping or codes & STAYS:
            return False
        most, newest = self._most()
        self._in_a_row = self._in_a_row + 1 if newest <= self._newest else 1
        self._newest = newest
        if self._in_a_row > most:
            return False
        behind = f"step {newest}" if newest > 0 else "the start"
        print(
            f"k3train: {first_failure(result.failures)}; starting all ranks again from {behind} "
            f"({self._in_a_row} of {most} without a new checkpoint)",
            file=sys.stderr,
            flush=True,
        )
        return True

    def starting(self) -> None:
        """Forget what the ranks of an earlier start have told, and tell those that start now."""
        self.alone = False
        for path in Path(self.folder).glob("*.json"):
            path.unlink(missing_ok=True)
        self._starts += 1
        os.environ[status.STARTS_VARIABLE] = str(self._starts)
        if self._guard is None:
            self._guard = guard.Guard(status.FOLDER_VARIABLE, self.folder)

    def started(self, ranks: dict[int, int]) -> None:
        """Watch over the ranks until they do so themselves."""
        self.ranks = ranks
        if self._watch is None:
            config = self._config()
            active = config is not None and config.fault.hang_seconds > 0
            limit = config.fault.meet_seconds if config is not None and active else 0.0
            self._watch = StartWatch(Path(config.run.dir if config else "").expanduser(), limit)
        self._watch.begin(ranks, time.monotonic())

    def still(self) -> list[int]:
        """Ranks that have hung before they could notice it; says so."""
        if self._watch is None or not (found := self._watch.still(time.monotonic())):
            return []
        text = self._watch.describe(found)
        print(f"k3train: {text}", file=sys.stderr, flush=True)
        with suppress(OSError):
            events.append(self._watch.run_dir, 0, "hang", text)
        return found

    def close(self) -> None:
        """Nothing is left to be guarded."""
        if self._guard is not None:
            self._guard.close()
        self._guard = None
        os.environ.pop(status.STARTS_VARIABLE, None)

    def _most(self) -> tuple[int, int]:
        """Restarts allowed, and the newest step that has a checkpoint (0 without one)."""
        given = any(word.partition("=")[0] in ("--max-restarts", "--max_restarts") for word in self._own())
        if ENTRY not in self.arguments:
            return self.options.max_restarts, 0
        if (config := self._config()) is None:
            return 0, 0
        newest = max(available(Path(config.run.dir).expanduser() / "checkpoints"), default=0)
        # Pods that meet at a fixed address are started again one by one, by their operator.
        alone = self.options.rdzv_backend == "c10d" or self.options.nnodes in ("1", "1:1")
        most = self.options.max_restarts if given else config.fault.max_restarts
        return most if alone else 0, newest

    def _config(self) -> Config | None:
        """What the ranks train; None where they train nothing, or would refuse it."""
        if ENTRY not in self.arguments:
            return None
        from .compose import compose

        with suppress(UserError):
            return compose(self.arguments[self.arguments.index(ENTRY) + 1 :])
        return None

    def _own(self) -> list[str]:
        """The agent's arguments, without the ranks'."""
        return self.arguments[: self.arguments.index("-m")] if "-m" in self.arguments else self.arguments


def first_failure(failures: Mapping[int, ProcessFailure | Any]) -> str:
    """Who failed first, and how.

    Ranks that lose one fail too, often before the agent sees the first, and their times are whole seconds: of
    those that failed together it is the one that was killed. The agent itself kills some seconds later.
    """
    first = min(failure.timestamp for failure in failures.values())
    together = {rank: each for rank, each in failures.items() if each.timestamp <= first + TOGETHER}
    rank, failure = min(together.items(), key=lambda item: (not _killed(item[1].exitcode), item[1].timestamp))
    code = failure.exitcode
    if code == HUNG:
        return "the run hung"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"
    return f"rank {rank} {how}"


def _killed(code: int) -> bool:
    """By another signal than the one with which the agent ends ranks."""
    return code < 0 and code != -signal.SIGTERM

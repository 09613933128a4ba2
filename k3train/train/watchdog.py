"""A thread that sees whether the run moves, and ends it where it does not, so that the agent starts it again.

The training thread writes a few attributes, the thread reads them, and neither waits for the other. A rank
in a collective cannot move, and is right to wait as long as any other rank moves; so only the whole run can
hang: no rank has begun or ended an operation or a phase, or moved a byte of a file, within the longest limit
of any.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from parallel.groups import Groups
from parallel.pipeline.place import Place
from parallel.pipeline.table import Op

from ..exit_status import HUNG
from ..fault_config import FaultConfig
from ..log import events
from .standing import Board, Standing, describe, innermost, stack_of, start_name, waiting_in

SLOW_PHASES = ("health", "meet", "start", "data", "eval", "checkpoint", "finish")
"""Long stretches without an operation: what threads read and write counts as movement there."""
FIRST_PHASES = ("health", "meet")
"""Before all ranks have met: `fault.meet_seconds` counts."""
LONG_PHASES = ("start", "finish")
JUDGES = 8
"""Ranks that read the whole board when they are due; the others wait half as long again."""
LOOKS, SHORTEST, LONGEST = 10, 0.1, 15.0
"""Looks within the limit, and bounds of the seconds between two."""
OWN = ("k3train", "parallel", "offload")


class Watchdog:
    """Watches one rank. `phase`, `took` and `place` are for the training thread, the rest for its own."""

    def __init__(self, config: FaultConfig, run_dir: Path) -> None:
        """For this process, as torchrun's environment variables name it; it need not have met the others."""
        self.config, self.run_dir = config, run_dir
        self.rank = int(os.environ.get("RANK", 0))
        self.place = Place()
        self.groups: Groups | None = None
        self._phase, self._step, self._marks = "meet", 0, 0
        self._warm = False
        self._times: deque[float] = deque(maxlen=32)
        self._board = Board(run_dir, self.rank, int(os.environ.get("WORLD_SIZE", 1)), start_name())
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._end = threading.Event()
        self._looks = 0
        self._seen: tuple[int, int] = (-1, -1)
        self._moved = self._looked = self._world_moved = time.monotonic()
        self._world: dict[int, tuple[int, int, float]] = {}
        self._known: dict[int, Standing] = {}
        self._host = socket.gethostname()

    @property
    def active(self) -> bool:
        """Whether hangs are looked for."""
        return self.config.hang_seconds > 0

    def start(self) -> None:
        """Begin to watch, in the phase `meet`; before anything that may wait for another rank."""
        if not self.active:
            return
        with suppress(OSError):
            self._post(0.0)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; safe to call twice."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self._board.close()

    @contextmanager
    def until_failure(self) -> Iterator[None]:
        """What fails in the block ends the watch: behind it the process stands still, and is right to."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """The training thread is in a phase of a step while the block lasts."""
        before = self._phase
        self._phase, self._step = name, step
        self._marks += 1
        try:
            yield
        finally:
            self._phase = before
            self._marks += 1

    def enter(self, name: str) -> None:
        """The training thread is in a phase from now on."""
        self._phase = name
        self._warm = self._warm and name not in LONG_PHASES
        self._marks += 1

    def took(self, seconds: float) -> None:
        """A step has ended: its time scales the limit."""
        self._times.append(seconds)
        self._warm = True
        self._marks += 1

    def follow(self, place: Place, groups: Groups) -> None:
        """Watch a stage's executor."""
        self.place, self.groups = place, groups

    def host_of(self, rank: int) -> str:
        """` on HOST`, where the board knows it."""
        standing = self._board.read().get(rank) if self.active else None
        return f" on {standing.host}" if standing else ""

    @property
    def limit(self) -> float:
        """Seconds without movement that are too long for what this rank does."""
        config = self.config
        typical = statistics.median(self._times.copy()) if self._times else 0.0
        limit = max(config.hang_seconds, config.hang_steps * typical)
        if self._phase in FIRST_PHASES:
            return config.meet_seconds
        return limit if self._warm else max(limit, config.start_seconds)

    @property
    def _interval(self) -> float:
        shortest = min(self.config.hang_seconds, self.config.meet_seconds)
        return min(max(shortest / LOOKS, SHORTEST), LONGEST)

    def _run(self) -> None:
        stalled, self._looked = 0.0, time.monotonic()
        # What is long overdue is looked at more often, so that a verdict reaches all ranks at once.
        while not self._end.wait(self._interval if 2 * stalled < self.limit else min(self._interval, 1.0)):
            # A file system that fails must not end a run that moves.
            with suppress(OSError):
                stalled = self._look(time.monotonic())

    def _look(self, now: float) -> float:
        """Seconds that this rank has stood still; does not return where the run hangs."""
        late = now - self._looked > 3 * self._interval + 1
        self._looked = now
        seen = self.place.beats + self._marks, _moved_bytes() if self._phase in SLOW_PHASES else 0
        if late or seen != self._seen:  # late: the whole process was stopped and goes on
            self._seen, self._moved = seen, now
            self._world_moved = max(self._world_moved, now)
        stalled = now - self._moved
        self._looks += 1
        self._post(stalled)
        if 2 * stalled < self.limit:
            self._world.clear()
            self._known.clear()
            return stalled
        if self._board.condemned():
            self._leave()
        if self.rank < JUDGES or stalled > 1.5 * self.limit:
            self._judge(now)
        return stalled

    def _post(self, stalled: float) -> None:
        if not self._board.is_open:
            self._board.open()
        self._board.post(self._standing(detail=2 * stalled >= self.limit))

    def _standing(self, *, detail: bool) -> Standing:
        """This rank's entry; with `detail` its stack is read too."""
        action, item = self.place.action, self.place.item
        operation = waiting = ""
        if item is not None:
            operation = f"{item}" if isinstance(item, Op) else f"{action} {item}"
        if detail:
            frame = stack_of(self._watched)
            waiting = waiting_in(frame) or self._message(action, item)
            operation = ", ".join(filter(None, (operation, innermost(frame, OWN))))
        return Standing(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            beats=sum(self._seen),
            looks=self._looks,
            step=self._step,
            phase=self._phase,
            operation=operation,
            waiting=waiting,
            limit=self.limit,
            start=self._board.start,
        )

    def _message(self, action: str, item: object) -> str:
        """Whom the pipeline's messages come from or go to, as global ranks."""
        if action == "finish":
            return "sends that nobody has taken yet"
        if action != "wait" or self.groups is None:
            return ""
        ranks = dist.get_process_group_ranks(self.groups.pg_collection.pp)
        return f"waits for rank {ranks[item.source]} of its pipeline {ranks}"  # type: ignore[attr-defined]

    def _judge(self, now: float) -> None:
        """Look at all ranks; where none has moved within the longest limit, end the run."""
        standings = self._known
        first = not standings
        standings |= self._board.read()
        silent = []
        for rank, standing in standings.items():
            # A rank that was not there at the first look has come meanwhile.
            unknown = (standing.beats if first else -1, -1, now)
            beats, looks, since = self._world.get(rank, unknown)
            if beats != standing.beats:
                self._world_moved = now
            if looks != standing.looks:
                since = now
            elif now - since > 3 * self._interval + 1:
                silent.append(rank)
            self._world[rank] = standing.beats, standing.looks, since
        quiet = now - max(self._world_moved, self._moved)
        if quiet <= max([self.limit, *(standing.limit for standing in standings.values())]):
            return
        text = describe(standings, silent, quiet, self._board.ranks)
        if self._board.condemn(text):
            text = f"{text}; stacks are in {self._board.folder}"
            print(f"k3train: {text}", file=sys.stderr, flush=True)
            with suppress(OSError):
                events.append(self.run_dir, self._step, "hang", text)
            self._dump()
            # The others find the verdict within a second, and leave their stacks.
            time.sleep(2.0 if self._board.ranks > 1 else 0.0)
        self._leave()

    def _dump(self) -> None:
        with suppress(OSError), self._board.stacks().open("x") as file:
            file.write(f"{self._standing(detail=True)}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _leave(self) -> None:
        """End this process: a collective that waits for ever lets nothing else through."""
        self._dump()
        sys.stderr.flush()
        os._exit(HUNG)


def _moved_bytes() -> int:
    """Bytes that the Python threads of this process, but the watchdog's, have read and written; 0 if unknown.

    Threads of gloo and NCCL, which keep talking while nothing moves, are no threads of Python.
    """
    total, me = 0, threading.get_native_id()
    for thread in threading.enumerate():
        if thread.native_id in (None, me):
            continue
        with suppress(OSError, ValueError):
            text = Path(f"/proc/self/task/{thread.native_id}/io").read_text()
            counts = dict(line.split(": ") for line in text.splitlines())
            total += int(counts["rchar"]) + int(counts["wchar"])
    return total

"""Sees to the ranks of a node until their own watchdogs do.

A rank that hangs in its imports, or is stopped there, watches nothing yet: the agent looks whether it
computes, reads or writes, until it stands on the run's board. Linux only; elsewhere nothing is seen.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from k3train.train.standing import Board, named

LOOKS = 10
"""Within the limit."""


class StartWatch:
    """Of one node, start by start."""

    def __init__(self, run_dir: Path, limit: float) -> None:
        """`limit`: seconds of stillness that are too long; 0 watches nothing."""
        self.run_dir, self.limit = run_dir, limit
        self._ranks: dict[int, int] = {}
        self._ticks: dict[int, int] = {}
        self._moved: dict[int, float] = {}
        self._looked = 0.0

    def begin(self, ranks: Mapping[int, int], now: float) -> None:
        """Ranks have been started; `ranks`: their process ids by rank."""
        self._ranks = dict(ranks) if self.limit > 0 else {}
        self._ticks, self._moved, self._looked = {}, dict.fromkeys(ranks, now), now

    def still(self, now: float) -> list[int]:
        """Ranks that have not moved for too long and do not watch themselves yet."""
        if not self._ranks or now - self._looked < self.limit / LOOKS:
            return []
        late = now - self._looked > 3 * self.limit / LOOKS + 1
        self._looked = now
        self._forget_watched()
        for rank, pid in self._ranks.items():
            ticks = ticks_of(pid)
            if late or ticks is None or ticks != self._ticks.get(rank):  # late: the agent was stopped, too
                self._moved[rank] = now
            self._ticks[rank] = ticks or 0
        return [rank for rank in self._ranks if now - self._moved[rank] >= self.limit]

    def describe(self, ranks: list[int]) -> str:
        """What is told of them."""
        return (
            f"hang: {named(ranks)} on {socket.gethostname()} has neither computed nor read for "
            f"{self.limit:.0f} s, before it met the others"
        )

    def _forget_watched(self) -> None:
        host = socket.gethostname()
        board = Board(self.run_dir, 0, max(self._ranks) + 1)
        for rank, pid in list(self._ranks.items()):
            standing = board.entry(rank)
            if standing is not None and (standing.pid, standing.host) == (pid, host):
                del self._ranks[rank]


def ticks_of(pid: int) -> int | None:
    """A number that grows while a process computes, reads or writes; None where it cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        computed = (int(fields[11]) + int(fields[12])) * (1_000_000 // os.sysconf("SC_CLK_TCK"))
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return computed + int(counts["rchar"]) + int(counts["wchar"])
    except (OSError, ValueError, KeyError, IndexError):
        return None

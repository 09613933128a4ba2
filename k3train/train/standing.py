"""Where the ranks of a run stand, on a board of small files that all can read: `ranks/` in its folder.

A file belongs to one rank, is overwritten in place and is read whole: no lock, no store that could hang
or die with the rank that keeps it. No clock is compared: a reader looks whether counters change.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "ranks"
VERDICT = "hang.json"
COLLECTIVES = "torch.distributed.distributed_c10d"
WRAPPERS = ("wrapper", "inner", "_wrapped")


@dataclass(frozen=True)
class Standing:
    """What one rank says of itself."""

    rank: int
    host: str
    pid: int
    beats: int
    """Changes whenever the rank begins or ends something."""
    looks: int
    """Changes whenever its watchdog looks: not, when its process is stopped or gone."""
    step: int
    phase: str
    operation: str = ""
    """Of the table; empty outside of it."""
    waiting: str = ""
    """The collective or message that it waits in, and with which ranks."""
    limit: float = 0.0
    """Seconds without movement that are too long for what it does."""
    start: str = ""
    """Which start of the run it belongs to; as `start_name`."""

    @property
    def place(self) -> str:
        """Phase, operation and wait in words."""
        parts = [f"step {self.step}", self.phase, self.operation, self.waiting]
        return ", ".join(filter(None, parts))


def start_name() -> str:
    """What the ranks of one start have in common, and those of another start have not.

    Pods that meet at a fixed address have the same at each start: what an earlier one left looks silent.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    met = [os.environ.get(name, "") for name in names]
    return " ".join(met) if any(met) else str(os.getpid())


class Board:
    """The files of one run; every method may raise OSError."""

    def __init__(self, run_dir: Path, rank: int, ranks: int, start: str = "") -> None:
        self.folder, self.rank, self.ranks, self.start = run_dir / FOLDER, rank, ranks, start
        self._file: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether this rank has its file."""
        return self._file is not None

    def open(self) -> None:
        """Make this rank's file; what an earlier start found is forgotten."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0 or self._verdict().get("start") != self.start:
            (self.folder / VERDICT).unlink(missing_ok=True)
        self.stacks().unlink(missing_ok=True)
        self._file = os.open(self._path(self.rank), os.O_CREAT | os.O_WRONLY, 0o666)

    def post(self, standing: Standing) -> None:
        """Overwrite this rank's entry."""
        assert self._file is not None, "the board is not open"
        line = json.dumps(asdict(standing)).encode() + b"\n"
        os.pwrite(self._file, line, 0)
        os.ftruncate(self._file, len(line))

    def read(self) -> dict[int, Standing]:
        """The entries of all ranks; one that is missing, half written or of another start is left out."""
        entries = {rank: self.entry(rank) for rank in range(self.ranks)}
        return {rank: found for rank, found in entries.items() if found and found.start == self.start}

    def entry(self, rank: int) -> Standing | None:
        """What a rank said last, of any start; None where it is missing or half written."""
        with suppress(OSError, ValueError, TypeError):
            return Standing(**json.loads(self._path(rank).read_bytes()))
        return None

    def condemn(self, text: str) -> bool:
        """Tell every rank that the run hangs; False when another rank has told so before."""
        try:
            file = os.open(self.folder / VERDICT, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        os.write(file, json.dumps({"rank": self.rank, "text": text, "start": self.start}).encode())
        os.close(file)
        return True

    def condemned(self) -> bool:
        """Whether some rank has told that the run hangs."""
        return (self.folder / VERDICT).exists()

    def _verdict(self) -> dict[str, Any]:
        """What is told; nothing, where nobody has, or not to the end."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.folder / VERDICT).read_bytes()))
        return {}

    def stacks(self) -> Path:
        """Where this rank's stacks go."""
        return self.folder / f"rank-{self.rank:05d}.stacks.txt"

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"


def suspects(standings: Mapping[int, Standing], silent: Sequence[int]) -> list[int]:
    """The ranks with an entry that the others most likely wait for.

    Those whose watchdog is silent; else those that wait for nobody; else those that are furthest behind.
    """
    if silent:
        return sorted(silent)
    busy = sorted(rank for rank, standing in standings.items() if not standing.waiting)
    if busy:
        return busy
    first = min((standing.step for standing in standings.values()), default=0)
    return sorted(rank for rank, standing in standings.items() if standing.step == first)


def describe(standings: Mapping[int, Standing], silent: Sequence[int], seconds: float, ranks: int) -> str:
    """The board in one line, beginning with whom the others wait for; ranks at one place stand together.

    A rank without an entry has not begun to watch itself: it hangs in its imports, or has not been started.
    """
    missing = [rank for rank in range(ranks) if rank not in standings]
    blamed = sorted([*silent, *missing]) or suspects(standings, silent)
    groups: dict[str, list[int]] = {}
    for rank, standing in standings.items():
        state = "silent since " if rank in silent else ""
        groups.setdefault(f"{state}{standing.place}", []).append(rank)
    order = sorted(groups.items(), key=lambda group: (group[1][0] not in blamed, group[1][0]))
    places = [f"{named(found)}{_host(standings, found)}: {place}" for place, found in order]
    if missing:
        places.append(f"{named(missing)}: no entry")
    look = "looks" if len(blamed) == 1 else "look"
    return f"hang: no rank has moved for {seconds:.0f} s; {named(blamed)} {look} stuck. {'; '.join(places)}"


def _host(standings: Mapping[int, Standing], ranks: Sequence[int]) -> str:
    return f" on {standings[ranks[0]].host}" if len(ranks) == 1 else ""


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0-6, 9`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def waiting_in(frame: FrameType | None) -> str:
    """The collective of torch.distributed that a thread is in, with its ranks; "" when it is in none."""
    found: FrameType | None = None
    while frame is not None:
        if frame.f_globals.get("__name__") == COLLECTIVES and frame.f_code.co_name not in WRAPPERS:
            found = frame
        elif found is not None and frame.f_code.co_name not in WRAPPERS:
            break
        frame = frame.f_back
    if found is None:
        return ""
    members = _members(found.f_locals)
    return f"in {found.f_code.co_name}" + (f" of {named(members)}" if members else "")


def _members(arguments: Mapping[str, Any]) -> list[int]:
    import torch.distributed as dist

    group = arguments.get("group")
    try:
        return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    except (ValueError, KeyError, RuntimeError):
        return []


def innermost(frame: FrameType | None, packages: Sequence[str]) -> str:
    """The innermost function of ours that a thread is in: `name (file:line)`."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages:
            name = Path(frame.f_code.co_filename).name
            return f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def stack_of(thread: int | None) -> FrameType | None:
    """The innermost Python frame of a thread of this process."""
    return sys._current_frames().get(thread or 0)

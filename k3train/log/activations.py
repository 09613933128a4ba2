"""`activations.jsonl`: what ranks held behind each operation of measured steps, and the plan of it beside.

One line an operation: {"step": n, "rank": r, "op": "F(0,3)", "seconds": t, "bytes": {place: n}}; `rank` is
that in the pipeline, `seconds` are of the operation's end by one clock of all ranks, places are those of
`activation_ledger`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .stacks import Series

FILE_NAME = "activations.jsonl"
TOGETHER = "together"
"""Row of all places on the device."""
ON_DEVICE = ("device", "fp8", "window")


@dataclass(frozen=True)
class Compared:
    """The most that any rank held of one place, by plan and as measured, bytes."""

    place: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over planned."""
        return self.measured / self.planned if self.planned else None


def read(folder: Path) -> dict[int, dict[int, Series]]:
    """Step -> rank -> what was held. Lines that cannot be parsed, as one not yet whole, are left out."""
    marks: dict[int, dict[int, list[tuple[float, dict[str, float]]]]] = {}
    path = folder / FILE_NAME
    for line in path.read_text().splitlines() if path.is_file() else []:
        entry = _entry(line)
        if entry is not None:
            step, rank, seconds, held = entry
            marks.setdefault(step, {}).setdefault(rank, []).append((seconds, held))
    found = {}
    for step, ranks in marks.items():
        origin = min(seconds for each in ranks.values() for seconds, _ in each)
        found[step] = {rank: _series(each, origin) for rank, each in sorted(ranks.items())}
    return found


def compare(planned: Sequence[Series], measured: Mapping[int, Series]) -> list[Compared]:
    """Peaks by place, those on the device also together; places that nobody planned or used are left out."""
    found = []
    for place in ("device", "fp8", "window", "host", "peer", "nvme"):
        both = [
            max((series.peak(place) for series in side), default=0) for side in (planned, measured.values())
        ]
        if any(both):
            found.append(Compared(place, *both))
    both = [max(map(_on_device, side), default=0) for side in (planned, measured.values())]
    if sum(entry.place in ON_DEVICE for entry in found) > 1:
        found.append(Compared(TOGETHER, *both))
    return found


def span(measured: Mapping[int, Series]) -> float:
    """Seconds of the step, from its first operation's end to its last one's."""
    return max((series.times[-1] for series in measured.values() if series.times), default=0.0)


def _on_device(series: Series) -> float:
    columns = zip(*(series.held[place] for place in ON_DEVICE if place in series.held), strict=True)
    return max(map(sum, columns), default=0)


def _entry(line: str) -> tuple[int, int, float, dict[str, float]] | None:
    try:
        entry: Any = json.loads(line)
        held = {str(place): float(nbytes) for place, nbytes in entry["bytes"].items()}
        return int(entry["step"]), int(entry["rank"]), float(entry["seconds"]), held
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _series(marks: Sequence[tuple[float, Mapping[str, float]]], origin: float) -> Series:
    ordered = sorted(marks, key=lambda mark: mark[0])
    places = dict.fromkeys(place for _, held in ordered for place in held)
    return Series(
        [seconds - origin for seconds, _ in ordered],
        {place: [held.get(place, 0.0) for _, held in ordered] for place in places},
    )

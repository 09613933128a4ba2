"""Rows of `benchmarks/mfu.py`: time of operators, parts and phases of a step beside what each must take.

Needs no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3train.config import Config

from .attribution import COPIES, IDLE, UNATTRIBUTED, Attribution, Label, Spent
from .floors import Ceilings, class_of, optimizer_floors, work_of_step

NOISE = 0.05
"""A time that is shorter than its floor by more than this says that the floor is wrong."""
OUTSIDE = {"loss": "output", "other": "ends", "embedding": "ends"}
"""Parts of operators that stand in no layer and have no name with a dot."""
LONG_GAP = 10e-6
"""Seconds without a kernel that count by themselves."""


@dataclass(frozen=True)
class Entry:
    """An operator of one part of the model, one way, in a step; seconds."""

    label: Label
    seconds: float
    floor: float | None
    """None: the lists know nothing of it."""
    calls: int = 0
    launches: float = 0.0
    waits: float = 0.0


def part_of(label: Label) -> str:
    """Of the model or the step, for every label."""
    if label.operator in (IDLE, UNATTRIBUTED, COPIES):
        return label.operator
    first, dot, _ = label.operator.partition(".")
    if dot and first in ("gradients", "optimizer"):
        return first
    if label.operator == "balance":
        return "balance"
    if label.part:
        return label.part
    return {"vit": "tower", "mtp": "mtp"}.get(first, OUTSIDE.get(label.operator, "output"))


def entries(config: Config, found: Attribution, ceilings: Ceilings, step: float) -> list[Entry]:
    """What a step of `step` seconds (not traced) was spent on, summing to it, each beside its floor.

    On a GPU what the tracing added is taken from `idle`, elsewhere from all alike. A floor is shared among
    the phases of its operator by their time.
    """
    spent = settled(found, step)
    floors = {key: ceilings.floor(work) for key, work in work_of_step(config).items()}
    updates = optimizer_floors(config, ceilings)
    floors |= {("", name, ""): floor for name, floor in updates.items()}
    times: dict[tuple[str, str, str], float] = defaultdict(float)
    for label, each in spent.items():
        times[_key(label, updates)] += each.seconds
    made = []
    for label, each in spent.items():
        key = _key(label, updates)
        floor = floors.get(key)
        if floor is not None and times[key]:
            floor *= each.seconds / times[key]
        calls = found.calls[label.operator, label.way] // found.steps
        made.append(Entry(label, each.seconds, floor, calls, each.launches, each.waits))
    return made


def settled(found: Attribution, step: float) -> dict[Label, Spent]:
    """Of one step, so that all sums to `step` seconds."""
    count = found.steps
    spent = {
        label: Spent(each.seconds / count, round(each.launches / count), each.waits / count)
        for label, each in found.spent.items()
    }
    idle = Label(operator=IDLE)
    traced = found.seconds / count
    busy = traced - spent[idle].seconds if idle in spent else 0.0
    if idle in spent and busy <= step:
        before = spent[idle].seconds
        spent[idle].seconds = step - busy
        for each in spent.values():
            each.waits *= (step - busy) / before if before else 0.0
        return spent
    for each in spent.values():
        each.seconds *= step / traced
        each.waits *= step / traced
    return spent


def operators(found: list[Entry]) -> list[dict[str, Any]]:
    """By operator and way, what loses most first."""
    rows = _grouped(found, lambda entry: (entry.label.operator, entry.label.way))
    for row, (operator, way) in rows:
        row |= {"class": class_of(operator) if row["floor ms"] is not None else "-"}
        row["way"] = way if operator != IDLE else "-"
        row["operator"] = operator
    order = (
        "operator",
        "way",
        "class",
        "ms",
        "calls",
        "launches",
        "floor ms",
        "lost ms",
        "share",
        "waits ms",
    )
    return _by_loss([{key: row[key] for key in order} for row, _ in rows])


def parts(found: list[Entry]) -> list[dict[str, Any]]:
    """By part of the model and way."""
    rows = _grouped(found, lambda entry: (part_of(entry.label), entry.label.way))
    order = ("ms", "launches", "floor ms", "lost ms", "share")
    return _by_loss(
        [{"part": part, "way": way, **{key: row[key] for key in order}} for row, (part, way) in rows]
    )


def phases(found: list[Entry]) -> list[dict[str, Any]]:
    """By phase of the trainer's step; moments without a kernel have none."""
    rows = _grouped(found, lambda entry: (entry.label.phase or _phaseless(entry.label),))
    order = ("ms", "launches", "floor ms", "lost ms", "share")
    return _by_loss([{"phase": phase, **{key: row[key] for key in order}} for row, (phase,) in rows])


def impossible(rows: list[dict[str, Any]]) -> list[str]:
    """Rows whose time is under their floor by more than noise."""
    return [
        f"{row['operator']} {row['way']}: {row['ms']:.3f} ms, floor {row['floor ms']:.3f} ms"
        for row in rows
        if row["floor ms"] is not None and row["ms"] < (1 - NOISE) * row["floor ms"]
    ]


def host(found: Attribution) -> dict[str, Any]:
    """Of a GPU's step as traced: how often it waited for the host."""
    count = found.steps
    return {
        "launches": sum(each.launches for each in found.spent.values()) / count,
        "gaps": len(found.gaps) / count,
        "gaps over 10 us": sum(gap > LONG_GAP for gap in found.gaps) / count,
        "ms in gaps over 10 us": 1e3 * sum(gap for gap in found.gaps if gap > LONG_GAP) / count,
        "traced idle ms": 1e3 * found.spent.get(Label(operator=IDLE), Spent()).seconds / count,
    }


def _key(label: Label, updates: Mapping[str, float]) -> tuple[str, str, str]:
    """Of `floors.work_of_step`, or of what is no part of forward and backward."""
    if label.operator in updates:
        return "", label.operator, ""
    part = part_of(label)
    return ("" if part in ("ends", "gradients") else part), label.operator, label.way


def _phaseless(label: Label) -> str:
    return IDLE if label.operator == IDLE else "beside them"


def _grouped(
    found: list[Entry], of: Callable[[Entry], tuple[str, ...]]
) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    whole = sum(entry.seconds for entry in found)
    groups: Mapping[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in found:
        groups[of(entry)].append(entry)
    rows = []
    for key, each in groups.items():
        known = [entry.floor for entry in each if entry.floor is not None]
        seconds, floor = sum(entry.seconds for entry in each), sum(known) if known else None
        row = {
            "ms": 1e3 * seconds,
            "calls": max(entry.calls for entry in each),
            "launches": sum(entry.launches for entry in each),
            "floor ms": None if floor is None else 1e3 * floor,
            "lost ms": 1e3 * (seconds - (floor or 0.0)),
            "share": seconds / whole,
            "waits ms": 1e3 * sum(entry.waits for entry in each),
        }
        rows.append((row, key))
    return rows


def _by_loss(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -row["lost ms"])

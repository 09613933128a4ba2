"""From a profiler's trace of steps to seconds of each operator, forward, backward and run again.

Reads the events of a Chrome trace (torch.profiler) in which `ranges` has named phases, parts and operators.
A backward belongs to the operator whose forward made its node of autograd (the trace's `fwdbwd` arrows);
what runs under a name inside a backward has been run again. On a GPU a kernel belongs to where the host
launched it; on a CPU the time of an event is its own, without what is inside it. Every moment of a step is
given to one row, so rows sum to the step: what has no name is `unattributed`, and on a GPU moments without
a kernel are `idle`.

Needs no torch. Times of events are microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = dict[str, Any]

STEP, PHASE, PART, OPERATOR = "k3.step", "k3.phase:", "k3.part:", "k3.op:"
UNATTRIBUTED, IDLE, COPIES = "unattributed", "idle", "copies"
ACCUMULATE = "gradients.accumulate"
FORWARD, BACKWARD, AGAIN = "forward", "backward", "again"
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
LAUNCH = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memset", "gpu_memcpy")
ENGINE = "autograd::engine::evaluate_function: "
MICRO = 1e-6


class Label(NamedTuple):
    """What a moment was spent on."""

    phase: str = ""
    part: str = ""
    operator: str = UNATTRIBUTED
    way: str = FORWARD


@dataclass
class Spent:
    """Of one label, in all steps of a trace."""

    seconds: float = 0.0
    launches: int = 0
    """Kernels and copies, on a CPU operations."""
    waits: float = 0.0
    """Seconds in which nothing ran, up to a kernel of this label."""


@dataclass
class Attribution:
    """Where the time of some steps went."""

    steps: int
    seconds: float
    """Of all steps, from the host's start to its end behind a synchronisation."""
    spent: dict[Label, Spent]
    calls: Counter[tuple[str, str]]
    """Times that a named operator ran, by operator and way."""
    gaps: list[float] = field(default_factory=list)
    """Seconds of each stretch without a kernel between two."""


@dataclass
class _Node:
    """A host event in its thread's stack."""

    event: Event
    parent: _Node | None
    end: float
    """Not behind its parent's, which rounding would have it."""
    inside: float = 0.0
    """Microseconds of the events in it."""
    made_by: _Node | None = None
    """Of a node of autograd: the forward operation."""
    label: Label | None = None


def attribute(events: Iterable[Event]) -> Attribution:
    """Spend each moment of the steps in a trace. Raises ValueError for a trace without a step."""
    known = [event for event in events if event.get("ph") in ("X", "s", "f")]
    nodes = _stacks([event for event in known if event["ph"] == "X" and event.get("cat") in HOST])
    _link(nodes, [event for event in known if event.get("cat") == "fwdbwd"])
    steps = [node for node in nodes if node.event["name"] == STEP]
    if not steps:
        raise ValueError(f"the trace has no {STEP}")
    phases = _Spans([node.event for node in nodes if node.event["name"].startswith(PHASE)])
    bounds = _Spans([node.event for node in steps])
    inside = [node for node in nodes if bounds.at(node.event["ts"]) is not None]
    device = [event for event in known if event["ph"] == "X" and event.get("cat") in DEVICE]
    seconds = sum(node.event["dur"] for node in steps) * MICRO
    found = Attribution(len(steps), seconds, defaultdict(Spent), _calls(inside))
    if device:
        _spend_device(found, _launched(inside, device, phases), bounds)
    else:
        _spend_host(found, inside, steps[0].event["tid"], phases)
    found.spent = dict(found.spent)
    return found


def _stacks(events: list[Event]) -> list[_Node]:
    """Each event below the one that contains it on its thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    nodes = []
    for each in threads.values():
        stack: list[_Node] = []
        # Of events with one beginning, the one that an annotation opened first is the outer one.
        for event in sorted(each, key=lambda e: (e["ts"], -e["dur"], e.get("args", {}).get("Ev Idx", 0))):
            while stack and event["ts"] >= stack[-1].end:
                stack.pop()
            parent = stack[-1] if stack else None
            node = _Node(event, parent, _end(event) if parent is None else min(_end(event), parent.end))
            if parent is not None:
                parent.inside += node.end - event["ts"]
            stack.append(node)
            nodes.append(node)
    return nodes


def _link(nodes: list[_Node], arrows: list[Event]) -> None:
    """Tell nodes of autograd which operation made them."""
    starts = {arrow["id"]: (arrow["tid"], arrow["ts"]) for arrow in arrows if arrow["ph"] == "s"}
    ends = {(arrow["tid"], arrow["ts"]): arrow["id"] for arrow in arrows if arrow["ph"] == "f"}
    at: dict[tuple[Any, float], _Node] = {}
    for node in nodes:
        if node.event["cat"] == "cpu_op":
            at[node.event["tid"], node.event["ts"]] = node  # the innermost of those with one beginning
    for place, arrow in ends.items():
        node = at.get(place)
        if node is not None and starts.get(arrow) in at:
            node.made_by = at[starts[arrow]]
            if node.parent is not None and node.parent.event["name"].startswith(ENGINE):
                node.parent.made_by = node.made_by


def _label(node: _Node | None) -> Label:
    """Of a node by what it is in, without the phase; every label is worked out once."""
    path: list[_Node] = []
    while node is not None and node.label is None:
        path.append(node)
        node = node.parent
    found = Label() if node is None or node.label is None else node.label
    for each in reversed(path):
        found = each.label = _inside(found, each)
    return found


def _inside(outer: Label, node: _Node) -> Label:
    name = node.event["name"]
    if name.startswith((PART, OPERATOR)):
        way = FORWARD if outer.way == FORWARD else AGAIN
        if name.startswith(PART):
            return outer._replace(part=name.removeprefix(PART), way=way)
        return outer._replace(operator=name.removeprefix(OPERATOR), way=way)
    if node.made_by is not None:
        return _label(node.made_by)._replace(way=BACKWARD)
    if name.startswith(ENGINE):
        operator = ACCUMULATE if name.endswith("AccumulateGrad") else UNATTRIBUTED
        return Label(operator=operator, way=BACKWARD)
    return outer


def _calls(nodes: list[_Node]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        label = _label(node)
        if node.event["name"].startswith(OPERATOR):
            found[label.operator, label.way] += 1
    return found


class _Spans:
    """Intervals of one kind, which do not overlap."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = sorted(events, key=lambda event: event["ts"])
        self.starts = [event["ts"] for event in self.events]

    def at(self, moment: float) -> Event | None:
        """The one around a moment."""
        index = bisect_right(self.starts, moment) - 1
        if index < 0 or moment >= _end(self.events[index]):
            return None
        return self.events[index]

    def phase(self, moment: float) -> str:
        """The name of the one around a moment."""
        event = self.at(moment)
        return "" if event is None else str(event["name"]).removeprefix(PHASE)


def _spend_host(found: Attribution, nodes: list[_Node], thread: Any, phases: _Spans) -> None:
    for node in nodes:
        if node.event["tid"] != thread:
            continue
        label = _label(node)._replace(phase=phases.phase(node.event["ts"]))
        spent = found.spent[label]
        spent.seconds += (node.end - node.event["ts"] - node.inside) * MICRO
        spent.launches += node.event["cat"] == "cpu_op"


def _launched(nodes: list[_Node], device: list[Event], phases: _Spans) -> list[tuple[Event, Label]]:
    """What the device did, with the label of where it was launched."""
    labels = {}
    for node in nodes:
        if node.event["cat"] in LAUNCH:
            label = _label(node)._replace(phase=phases.phase(node.event["ts"]))
            labels[node.event.get("args", {}).get("correlation")] = label
    unknown = Label()
    return [(event, labels.get(event.get("args", {}).get("correlation"), unknown)) for event in device]


def _spend_device(found: Attribution, launched: list[tuple[Event, Label]], steps: _Spans) -> None:
    for step in steps.events:
        own = [each for each in launched if step["ts"] <= each[0]["ts"] < _end(step)]
        for _, label in own:
            found.spent[label].launches += 1
        _sweep(found, own, step["ts"], _end(step))


def _sweep(found: Attribution, launched: list[tuple[Event, Label]], begin: float, end: float) -> None:
    """Give each moment to what ran, kernels before copies, in equal parts; or to nothing."""
    marks: list[tuple[float, int, int]] = []
    for index, (event, _) in enumerate(launched):
        if event["dur"] > 0:
            marks += [(event["ts"], 1, index), (min(_end(event), end), 0, index)]
    active: set[int] = set()
    now, idle, ran = begin, 0.0, False
    for moment, starts, index in sorted(marks):
        _share(found, launched, active, (moment - now) * MICRO)
        idle += 0.0 if active else (moment - now) * MICRO
        now = moment
        if not starts:
            active.discard(index)
            ran = True
            continue
        if idle > 0:
            found.spent[launched[index][1]].waits += idle
            found.gaps += [idle] if ran else []
            idle = 0.0
        active.add(index)
    found.spent[Label(operator=IDLE)].seconds += (end - now) * MICRO


def _share(found: Attribution, launched: list[tuple[Event, Label]], active: set[int], seconds: float) -> None:
    if seconds <= 0:
        return
    if not active:
        found.spent[Label(operator=IDLE)].seconds += seconds
        return
    computing = [index for index in active if not _is_host_copy(launched[index][0])]
    for index in computing or active:
        label = launched[index][1] if computing else launched[index][1]._replace(operator=COPIES)
        found.spent[label].seconds += seconds / len(computing or active)


def _is_host_copy(event: Event) -> bool:
    return event["cat"] == "gpu_memcpy" and "DtoD" not in event["name"]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])

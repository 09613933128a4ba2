"""Why a layout is where it is in a search: what fills its memory, what its step waits for, what others lack.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import step_time
from .activation_plan import ACTIVATION_KINDS
from .search import Planned, Planner
from .search_space import Layout, Space

GIB = 2**30
SHOWN = 3
"""Exposed parts of a step that are named."""
SHORT = 4096
"""Operations up to which a neighbour is planned."""
SAME = 5e-4
"""Share of a step's time that is no difference."""


def reasons(planned: Planned, best: Planned, limit: int) -> list[str]:
    """What limits a layout, what of it is exposed, and what it has more than the best one."""
    assert planned.step is not None and best.step is not None
    held, step = planned.ranks[planned.fullest], planned.step
    kinds = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.3g}" for name, size in _largest(held))
    lines = [
        f"pipeline rank {planned.fullest} holds {planned.bytes / GIB:.4g} of {limit / GIB:.4g} GiB: {kinds}"
    ]
    exposed = sorted(step.exposed.items(), key=lambda item: -item[1][0])[:SHOWN]
    lines += [
        f"exposed {name.replace('_', ' ')} {spent:.3g} s ({spent / step.seconds:.1%}): {why}"
        for name, (spent, why) in exposed
    ]
    if planned is not best:
        lines.append(f"{step.seconds / best.step.seconds - 1:+.1%} to the best: {_more_time(best, planned)}")
    return lines


def _largest(held: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(held.items(), key=lambda item: -item[1])[:SHOWN]


def _more_time(base: Planned, other: Planned) -> str:
    """The part of the step that grew most."""
    assert base.step is not None and other.step is not None
    names = dict.fromkeys([*base.step.parts, *other.step.parts])
    more = {name: other.step.parts.get(name, 0.0) - base.step.parts.get(name, 0.0) for name in names}
    name = max(more, key=lambda each: more[each])
    return f"{name.replace('_', ' ')} {more[name]:+.3g} s"


def neighbours(planner: Planner, planned: Planned) -> list[dict[str, Any]]:
    """What becomes of a layout when one thing changes.

    Times are the plan's where its table is short, else those of a closed form, and then of both.
    """
    found = []
    for change, layout in _changes(planner.space, planned.layout):
        other = planner.held(layout)
        if other is None:
            continue
        entry: dict[str, Any] = {"change": change, "memory_bytes": other.bytes}
        if other.bytes > planner.limit:
            kind, more = _more_bytes(planned, other)
            entry |= {"fits": False, "why": f"{change}: {more / GIB:+.3g} GiB of {kind}, does not fit"}
        else:
            before, after, about = _timed(planner, planned, other)
            assert before.step is not None and after.step is not None
            entry |= {"fits": True, "step_seconds": after.step.seconds, "is_closed_form": bool(about)}
            entry["why"] = f"{change}: {about}{_compared(before, after)}"
        found.append(entry)
    return found


def _timed(planner: Planner, base: Planned, other: Planned) -> tuple[Planned, Planned, str]:
    """Both with times that can be compared, and "about " where those are of the closed form."""
    layout = other.layout
    if 2 * layout.pipeline * layout.virtual * layout.microbatches <= SHORT:
        exact = planner.plan(layout)
        assert exact is not None
        return base, exact, ""
    before, after = (replace(each, step=step_time.estimate(each.config)) for each in (base, other))
    return before, after, "about "


def _compared(base: Planned, other: Planned) -> str:
    """Time and what of it grew most, or memory where the time is the same."""
    assert base.step is not None and other.step is not None
    share = other.step.seconds / base.step.seconds - 1
    if abs(share) < SAME:
        return f"the same time, {(other.bytes - base.bytes) / GIB:+.3g} GiB"
    return f"{share:+.1%} time, {_more_time(base, other)}"


def _more_bytes(base: Planned, other: Planned) -> tuple[str, int]:
    """The kind of bytes that grew most on the fullest ranks; activations together."""
    before, after = (_kinds(each.ranks[each.fullest]) for each in (base, other))
    more = {name: after.get(name, 0) - before.get(name, 0) for name in dict.fromkeys([*before, *after])}
    name = max(more, key=lambda each: more[each])
    return name.replace("_", " "), more[name]


def _kinds(held: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in held.items():
        kind = "activations" if name in ACTIVATION_KINDS else name
        found[kind] = found.get(kind, 0) + size
    return found


def _changes(space: Space, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """The next smaller and larger value of each side, the other policies and places of states."""
    pipeline, context = layout.pipeline, layout.context

    def nearest(name: str, values: list[int]) -> Iterator[tuple[str, int]]:
        now = getattr(layout, name.lower())
        below, above = [v for v in values if v < now], [v for v in values if v > now]
        for value in [*below[-1:], *above[:1]]:
            yield f"{name.lower()} {value} instead of {now}", value

    for text, value in nearest("pipeline", space.pipelines()):
        for other in _spread(space, replace(layout, pipeline=value, cut=None), context):
            yield text, other
    for text, value in nearest("virtual", space.virtuals(pipeline)):
        yield text, replace(layout, virtual=value, cut=space.cuts(pipeline, value)[-1])
    for text, value in nearest("expert", space.experts(pipeline)):
        yield text, replace(layout, expert=value)
    for text, value in nearest("context", [each for each, _ in space.spreads(pipeline)]):
        for other in _spread(space, layout, value):
            yield text, other
    counts = dict(space.batches(context, layout.data))
    for text, value in nearest("size", list(counts)):
        yield f"micro-batch {text}", replace(layout, size=value, microbatches=counts[value])
    for policy in space.policies:
        if policy != layout.policy and space.usable(pipeline, policy):
            yield f"policy {policy} instead of {layout.policy}", replace(layout, policy=policy)
    for states in space.states:
        if sum(a != b for a, b in zip(states, layout.states, strict=True)) == 1:
            text = f"ZeRO-{states.zero}, gradients on {states.gradients}, optimizer on {states.optimizer}"
            yield text, replace(layout, states=states)


def _spread(space: Space, layout: Layout, context: int) -> Iterator[Layout]:
    """With another number of data ranks, and so of micro-batches."""
    data = dict(space.spreads(layout.pipeline)).get(context)
    if data is None or layout.virtual not in space.virtuals(layout.pipeline):
        return
    count = dict(space.batches(context, data)).get(layout.size)
    if count is not None and layout.expert in space.experts(layout.pipeline):
        cut = layout.cut if layout.cut else space.cuts(layout.pipeline, layout.virtual)[-1]
        yield replace(layout, context=context, data=data, microbatches=count, cut=cut)

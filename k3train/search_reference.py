"""The plain search: every layout of a space is planned. Minutes for what `search` does in seconds."""

from __future__ import annotations

from .search import Found, Planned, Planner
from .search_space import Space


def search_all(space: Space, top: int = 10) -> Found:
    """As `search.search`."""
    planner = Planner(space)
    found = Found([], planner.limit)
    best: dict[tuple[int, ...], Planned] = {}
    for layout in space.layouts():
        planned = planner.plan(layout)
        found.planned += 1
        if planned is None:
            continue
        if planned.step is None:
            if found.nearest is None or planned.bytes < found.nearest.bytes:
                found.nearest = planned
            continue
        found.tried[layout] = planned
        own = best.get(layout.name)
        if own is None or planned.order < own.order:
            best[layout.name] = planned
    found.best = sorted(best.values(), key=lambda each: each.order)[:top]
    return found

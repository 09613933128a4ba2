"""A plan's step time and traffic for the terminal, from its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .step_time import COMPUTING

SMALL = 0.002
"""Share of the step below which a part has no row of its own."""
NAMES = {
    "dense_gemm": "dense products",
    "grouped_gemm": "products of routed experts",
    "kda_core": "KDA core",
    "attention": "attention core",
    "memory": "memory-bound operators",
    "launch": "launching operators",
    "recompute": "running layers again",
    "operation": "around operations",
    "fp8": "FP8 there and back",
    "vision": "vision tower",
    "expert_exchange": "expert exchange",
    "expert_weights": "borrowed experts",
    "context_exchange": "context exchange",
    "offload": "waiting for tiers",
    "bubble": "bubble",
    "messages": "pipeline messages",
    "gradient_reduce": "sums of gradients",
    "vision_gradients": "sums of the tower's gradients",
    "optimizer": "update",
    "newton_schulz": "Newton-Schulz",
    "muon_exchange": "Muon's blocks",
    "optimizer_offload": "states from their tier",
    "parameter_gather": "gathering parameters",
    "balance": "balancing",
    "step": "rest of the step",
    "checkpoint": "checkpoints",
}
"""Of the parts of a step, for people, in the order in which they are shown."""
LINKS = {"none": "-", "link": "links", "network": "network"}


def largest(planned: Mapping[str, Any], count: int = 3) -> str:
    """The parts that take longest, in a line."""
    spent = sorted(planned["step_seconds_by_part"].items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{NAMES[name]} {seconds / planned['step_seconds']:.0%}" for name, seconds in spent)


def shown_parts(planned: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """(name, seconds, why nothing hides it) of each part that matters, then of all others together."""
    spent, why = planned["step_seconds_by_part"], planned["exposed"]
    known = [name for name in NAMES if spent.get(name, 0.0) >= SMALL * planned["step_seconds"]]
    rows = [(NAMES[name], spent[name], why.get(name, {}).get("why", "")) for name in known]
    rest = sum(seconds for name, seconds in spent.items() if name not in known)
    if rest:
        rows.append(("all else", rest, ""))
    return rows


def time_table(planned: Mapping[str, Any]) -> Table:
    """The step of the busiest rank by what it is spent on."""
    step = planned["step_seconds"]
    unit, factor = ("s", 1.0) if step >= 1 else ("ms", 1e3)
    computing = sum(planned["step_seconds_by_part"].get(name, 0.0) for name in COMPUTING)
    title = f"Step of the busiest rank, {step * factor:,.3g} {unit}, {computing / step:.0%} the model's work"
    table = Table(title=title, title_justify="left", caption=_saving(planned))
    for name in ("part", unit, "share", "why nothing hides it"):
        table.add_column(name, justify="right" if name in (unit, "share") else "left")
    for name, seconds, why in shown_parts(planned):
        table.add_row(name, f"{seconds * factor:,.3g}", f"{seconds / step:.1%}", why)
    return table


def _saving(planned: Mapping[str, Any]) -> str | None:
    """What checkpoints add, which are no part of the step."""
    saving = planned["exposed"].get("checkpoint")
    return f"Beside it {saving['seconds'] * 1e3:.3g} ms a step: {saving['why']}" if saving else None


def traffic_rows(planned: Mapping[str, Any]) -> list[tuple[str, str, str, int]]:
    """(what, group, links, bytes) of all that is sent."""
    links = planned["traffic_links"]
    return [
        (name.replace("_", " "), links[name][0], LINKS[links[name][1]], size)
        for name, size in planned["traffic_bytes"].items()
        if size
    ]


def traffic_table(planned: Mapping[str, Any]) -> Table:
    """What the busiest rank sends, by group and link class."""
    rows = traffic_rows(planned)
    totals: dict[str, int] = {}
    for _, _, link, size in rows:
        totals[link] = totals.get(link, 0) + size
    caption = ", ".join(f"{size / 1e6:,.1f} MB over {link}" for link, size in totals.items())
    table = Table(title="Sent by the busiest rank in a step", title_justify="left", caption=caption or None)
    for name in ("what", "group", "over", "MB"):
        table.add_column(name, justify="right" if name == "MB" else "left", min_width=8)
    for what, group, link, size in rows:
        table.add_row(what, group, link, f"{size / 1e6:,.2f}")
    return table

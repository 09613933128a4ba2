"""A rehearsal as a table of the kinds of ranks, or as JSON. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .rehearsal_facts import RankFacts

if TYPE_CHECKING:
    from .rehearsal import Result

ASSUMPTIONS = (
    "tensors hold no values and collectives do nothing: shapes, places, bytes and order are what is compared",
    "what tiers below the device would hold is built on the device; experts travel by collectives",
    "operators without CUDA stand in for a GPU's: parameters and their layout do not depend on them",
)
NAMES = {
    "parameters": "weights",
    "gradients": "gradients",
    "gradient_slots": "slots",
    "master_weights": "masters",
    "optimizer_states": "moments",
    "vision_states": "vision",
}


def describe(result: Result) -> dict[str, Any]:
    """What a program reads: kinds of ranks, problems, and how much was built."""
    return {
        "world_size": result.topology.world_size,
        "layout": vars(result.topology),
        "groups_of_ranks": len(result.facts),
        "built_ranks": [facts.rank for facts in result.built],
        "saved_elements": result.elements,
        "kinds": list(_kinds(result)),
        "problems": [
            {"rank": found.rank, "object": found.what, "text": found.text} for found in result.problems
        ],
        "assumptions": list(ASSUMPTIONS),
    }


def render(result: Result) -> RenderableType:
    """The kinds of ranks, and what was compared. Problems are the caller's to show."""
    kinds = list(_kinds(result))
    table = Table(
        title="Kinds of ranks, GB held", title_justify="left", caption="held as planned, or (planned)"
    )
    for name in ("place", "built", "layers", "experts"):
        table.add_column(name)
    held = [kind for kind in NAMES if any(kind in each["held"] for each in kinds)]
    for kind in held:
        table.add_column(NAMES[kind], justify="right")
    for each in kinds:
        table.add_row(
            str(each["pipeline"]), f"{each['built']} of {each['ranks']}", each["layers"],
            str(each["experts"]),
            *(_gigabytes(each["held"].get(kind), each["planned"].get(kind, 0)) for kind in held),
        )  # fmt: skip
    return Group(table, Text(_summary(result)), Text("\n".join(f"- {line}" for line in ASSUMPTIONS)))


def _kinds(result: Result) -> Iterator[dict[str, Any]]:
    """Ranks at one place of their pipelines: they hold equally much, but for where shards are cut."""
    places: dict[int, list[RankFacts]] = defaultdict(list)
    for facts in result.built:
        places[result.topology.coordinates(facts.rank)["pipeline"]].append(facts)
    for place, members in sorted(places.items()):
        first = members[0]
        experts = next(iter(first.experts.values()), ())
        kinds = first.held
        yield {
            "pipeline": place,
            "ranks": result.topology.world_size // result.topology.pipeline,
            "built": len(members),
            "layers": ", ".join(f"{s.layers.start}-{s.layers.stop - 1}" for s in first.stages),
            "experts": len(experts),
            "held": {
                kind: [min(m.held[kind] for m in members), max(m.held[kind] for m in members)]
                for kind in kinds
            },
            "planned": {kind: result.planned[place].get(kind, 0) for kind in kinds},
        }


def _gigabytes(held: list[int] | None, planned: int) -> str:
    if held is None:
        return "-"
    least, most = (f"{size / 1e9:,.3f}" for size in held)
    shown = most if least == most else f"{least} to {most}"
    return shown if most == f"{planned / 1e9:,.3f}" else f"{shown} ({planned / 1e9:,.3f})"


def _summary(result: Result) -> str:
    built, total = len(result.built), result.topology.world_size
    groups = f"groups of all {len(result.facts):,} ranks, everything of {built:,}"
    if built < total:
        return f"built: {groups}; ranks=all also finds what no rank saves"
    return f"built: {groups}; checkpoints hold each of {result.elements:,} elements once"

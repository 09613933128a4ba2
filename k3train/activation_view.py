"""The activations of a plan by site, by tier and over the step: as data and for the terminal. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table as RichTable

from offload.policy import KEEP, TIERS, Storage
from parallel.pipeline.rows import RowPlan
from parallel.pipeline.simulate import Timeline
from parallel.pipeline.table import Table

from .activation_ledger import (
    Sizes,
    Stage,
    as_measured,
    build_stages,
    moved,
    place,
    recomputed,
    series,
    stage_places,
    stages,
    tower_places,
)
from .activation_policy import policy_of
from .activation_time import Added, region_seconds
from .config import Config
from .log.stacks import Series
from .memory import Parts, rank_activations
from .microbatch import element_bytes

MIB, GIB = 2**20, 2**30
SMALL = 0.01
"""Share of all bytes up to which a site is not shown by itself."""


def describe(
    config: Config,
    cuts: list[range],
    table: Table,
    rows: RowPlan,
    parts: Parts,
    extra: Sequence[Added],
) -> dict[str, Any]:
    """Plain data: the policy, sites of the language model, tiers by pipeline rank, seconds that are added.

    Bytes and seconds of a site are those of one micro-batch in the stage where it has most.
    """
    found, count = stages(config, cuts, rows), config.run.microbatches
    held = rank_activations(config, table, found, parts)
    return {
        "policy": config.offload.policy,
        "sites": site_rows(config, cuts, rows, found),
        "tiers": [part.tiers for part in held],
        "added_seconds": {
            "recompute": count * _slowest(rows, [each.recompute for each in extra]),
            "fp8": count * _slowest(rows, [2 * each.coding for each in extra]),
            "waits": count * _slowest(rows, [each.waits_out + each.waits_back for each in extra]),
        },
    }


def _slowest(rows: RowPlan, by_stage: Sequence[float]) -> float:
    """The most of any rank."""
    spent = [0.0] * rows.layout.pipeline
    for stage, seconds in enumerate(by_stage):
        spent[rows.layout.home(stage)[0]] += seconds
    return max(spent)


def site_rows(
    config: Config, cuts: list[range], rows: RowPlan, found: Sequence[Stage]
) -> list[dict[str, Any]]:
    """One entry for each site that holds something, or would if it were kept."""
    policy, smallest = policy_of(config), config.offload.min_kib << 10
    kept = build_stages(config, cuts, rows, layered=False, mtp_layered=False)
    before = [stage.sizes(lambda _: False, smallest) for stage in kept]
    after = [stage.sizes(recomputed(policy), smallest) for stage in found]
    seconds = region_seconds(config, cuts)
    names = dict.fromkeys(name for stages in (after, before) for sizes in stages for name in sizes)
    entries = []
    for name in names:
        storage, size = policy.storage(name), _largest(after, name)
        spent = max((stage.get(name, 0.0) for stage in seconds), default=0.0)
        saved = _largest(before, name)
        entry = {
            "site": name,
            "storage": str(storage),
            "pattern": policy.pattern(name),
            "saved_bytes": int(saved.whole + saved.alone),
            "held_bytes": int(moved(size, storage, element_bytes(config.model)) + size.alone),
            "place": place(storage),
            "recompute_seconds": spent if storage.recompute else 0.0,
        }
        entries.append(entry | {"why": _why(entry, storage)})
    return entries


def _largest(stages: Sequence[Mapping[str, Sizes]], name: str) -> Sizes:
    return max(
        (sizes[name] for sizes in stages if name in sizes), key=lambda size: size.whole, default=Sizes()
    )


def _why(entry: Mapping[str, Any], storage: Storage) -> str:
    """What the storage costs and brings, in words."""
    saved, held = entry["saved_bytes"], entry["held_bytes"]
    if storage == KEEP or not saved:
        return ""
    parts = []
    if storage.recompute and entry["recompute_seconds"]:
        parts.append(f"{entry['recompute_seconds'] * 1e3:.3g} ms to make again")
    elif not held:
        return "made again by the region that it comes from"
    less = saved if storage.tier is not None else saved - held
    if storage.tier is not None and held:
        parts.append(f"{held / MIB:,.1f} MiB leave and come back")
    parts.append(f"{less / MIB:,.1f} MiB less on the device")
    return ", ".join(parts)


def planned_series(
    config: Config, cuts: list[range], rows: RowPlan, timeline: Timeline, parts: Parts
) -> list[Series]:
    """What the manager of each pipeline rank holds over the planned step, as `activations.jsonl` has it."""
    table, window = timeline.table, config.offload.inflight_mib << 20
    found = stages(config, cuts, rows)
    result = []
    for rank in range(table.layout.pipeline):
        held = [stage_places(config, stage, rank) for stage in found]
        tower = tower_places(config, parts, rank) if parts else []
        marks = [as_measured(now, window) for now in series(table, rank, held, tower)]
        places = dict.fromkeys(name for mark in marks for name in mark)
        times = [float(end) for end in timeline.ends[rank]]
        result.append(Series(times, {name: [mark.get(name, 0.0) for mark in marks] for name in places}))
    return result


def render(described: Mapping[str, Any]) -> list[RichTable]:
    """Tables of sites and tiers; none where everything is kept."""
    if all(entry["storage"] == "keep" for entry in described["sites"]):
        return []
    return [_site_table(described), *([_tier_table(described)] if any(described["tiers"]) else [])]


def facts(described: Mapping[str, Any]) -> dict[str, str]:
    """A line for the plan's summary."""
    names = {"recompute": "running regions again", "fp8": "FP8", "waits": "copies that are not hidden"}
    added = described["added_seconds"]
    spent = ", ".join(f"{added[name]:.3g} s for {text}" for name, text in names.items() if added[name])
    return {
        "activations": f"{described['policy']}" + (f"; added to the slowest rank: {spent}" if spent else "")
    }


def _site_table(described: Mapping[str, Any]) -> RichTable:
    """The largest sites one by one, the rest in one row."""
    caption = "MiB and ms of one micro-batch, in the stage where a site has most"
    table = RichTable(
        title=f"Activations, policy {described['policy']}", title_justify="left", caption=caption
    )
    columns = ("site", "storage", "if kept", "held", "where", "again, ms")
    for name in columns:
        table.add_column(name, justify="left" if name in ("site", "storage", "where") else "right")
    ordered = sorted(described["sites"], key=lambda entry: -entry["saved_bytes"])
    total = sum(entry["saved_bytes"] for entry in ordered)
    shown = [entry for entry in ordered if max(entry["saved_bytes"], entry["held_bytes"]) > SMALL * total]
    for entry in shown:
        spent = entry["recompute_seconds"] * 1e3
        table.add_row(
            entry["site"], entry["storage"], *_sizes([entry]), entry["place"] if entry["held_bytes"] else "",
            f"{spent:.3g}" if spent else "",
        )  # fmt: skip
    rest = [entry for entry in ordered if entry not in shown]
    if rest:
        spent = sum(entry["recompute_seconds"] for entry in rest) * 1e3
        table.add_row(f"{len(rest)} small ones", "", *_sizes(rest), "", f"{spent:.3g}" if spent else "")
    return table


def _sizes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{sum(entry[name] for entry in entries) / MIB:,.1f}" for name in ("saved_bytes", "held_bytes")]


def _tier_table(described: Mapping[str, Any]) -> RichTable:
    most = max(size for held in described["tiers"] for size in held.values())
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    table = RichTable(title=f"{name} of activations elsewhere, at most", title_justify="left")
    used = [tier for tier in TIERS if any(tier in rank for rank in described["tiers"])]
    for column in ("pipeline ranks", *used):
        table.add_column(column, justify="left" if column == "pipeline ranks" else "right")
    for held, members in groupby(enumerate(described["tiers"]), key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in members]
        label = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        table.add_row(label, *(f"{held.get(tier, 0) / unit:.2f}" for tier in used))
    return table

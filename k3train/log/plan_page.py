"""`plan.html`: a plan as one self-contained page, with bars of memory and of the step's parts. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from typing import Any

from .charts import NAMED_COLOURS

Bar = tuple[str, float, float]
"""Name, start and length, both as shares of the whole."""
STYLE = """
.bars { display: grid; grid-template-columns: minmax(120px, max-content) 1fr max-content; gap: 5px 14px;
  align-items: center; font-size: 13px; }
.bars .track { position: relative; height: 16px; background: var(--faint); border-radius: 3px; }
.bars .track i { position: absolute; top: 0; bottom: 0; border-radius: 2px; }
.bars .limit { border-right: 2px solid var(--line-5); background: none; }
.bars .why { grid-column: 2 / -1; color: var(--soft); font-size: 12px; margin: -3px 0 4px; }
table.plain { border-collapse: collapse; font-size: 13px; width: 100%; }
table.plain td, table.plain th { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid
var(--faint); } table.plain td.number, table.plain th.number { text-align: right; } .wide { overflow-x: auto;
} .notes { color: var(--soft); font-size: 12.5px; }
"""


def page(
    planned: Mapping[str, Any],
    facts: Mapping[str, str],
    parts: Sequence[tuple[str, float, str]],
    traffic: Sequence[tuple[str, str, str, int]],
    pictures: Mapping[str, str],
) -> str:
    """The document.

    Args:
        planned: the plan's JSON.
        facts: lines of its summary, by name.
        parts: (name, seconds, why nothing hides it) of the step.
        traffic: (what, group, links, bytes) of what is sent.
        pictures: titles and inline SVG.
    """
    style = (resources.files(__package__) / "assets" / "report.css").read_text()
    title = f"Plan of {escape(str(planned['recipe']))}"
    about = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(line)}</td></tr>" for name, line in facts.items()
    )
    drawn = "".join(f"<h2>{escape(name)}</h2><div class='wide'>{svg}</div>" for name, svg in pictures.items())
    notes = "".join(f"<li>{escape(line)}</li>" for line in planned["assumptions"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>\n{style}{STYLE}</style></head>\n<body><main><h1>{title}</h1>"
        f"<table class='plain'>{about}</table>"
        f"<h2>Step of the busiest rank</h2>{waterfall(parts)}"
        f"<h2>Memory of a rank</h2>{ledger(planned['memory_bytes'], planned['memory_limit_bytes'])}"
        f"<h2>Sent by the busiest rank in a step</h2>{traffic_table(traffic)}{drawn}"
        f"<h2>What the plan rests on</h2><ul class='notes'>{notes}</ul></main></body></html>\n"
    )


def waterfall(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar for each part, where the one before ends."""
    whole = sum(seconds for _, seconds, _ in parts) or 1.0
    rows, start = [], 0.0
    for number, (name, seconds, why) in enumerate(parts):
        bar = _bar(start / whole, seconds / whole, number, f"{name}: {seconds:.4g} s")
        told = f"{seconds:.3g} s, {seconds / whole:.1%}"
        rows.append(f"<span>{escape(name)}</span><div class='track'>{bar}</div><span>{told}</span>")
        if why:
            rows.append(f"<span class='why'>{escape(why)}</span>")
        start += seconds
    return f"<div class='bars'>{''.join(rows)}</div>"


def ledger(ranks: Sequence[Mapping[str, int]], limit: int) -> str:
    """One stacked bar for neighbouring ranks that hold equally much; a line marks what a rank has."""
    kinds = [kind for kind in ranks[0] if any(rank[kind] for rank in ranks)]
    most = max(limit, *(sum(rank.values()) for rank in ranks))
    rows = []
    for held, members in groupby(enumerate(ranks), key=lambda pair: pair[1]):
        numbers = [number for number, _ in members]
        name = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]} to {numbers[-1]}"
        start, bars = 0.0, []
        for number, kind in enumerate(kinds):
            bars.append(_bar(start / most, held[kind] / most, number, f"{kind}: {_bytes(held[kind])}"))
            start += held[kind]
        bars.append(f"<i class='limit' style='left:0;width:{100 * limit / most:.2f}%'></i>")
        rows.append(
            f"<span>{name}</span><div class='track'>{''.join(bars)}</div><span>{_bytes(start)}</span>"
        )
    keys = "".join(
        f"<span><i style='background:{_colour(number)}'></i>{escape(kind.replace('_', ' '))}</span>"
        for number, kind in enumerate(kinds)
    )
    return f"<p class='legend'>{keys}</p><div class='bars'>{''.join(rows)}</div>"


def traffic_table(traffic: Sequence[tuple[str, str, str, int]]) -> str:
    """What is sent, by group and class of links, and the sums of each class."""
    totals: dict[str, int] = {}
    rows = []
    for what, group, link, size in traffic:
        totals[link] = totals.get(link, 0) + size
        rows.append(_row(what, group, link, size))
    rows += [_row("sum", "", link, size) for link, size in totals.items()]
    head = "<tr><th>what</th><th>group</th><th>over</th><th class='number'>bytes</th></tr>"
    return f"<table class='plain'>{head}{''.join(rows)}</table>"


def _row(what: str, group: str, link: str, size: int) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in (what, group, link))
    return f"<tr>{cells}<td class='number'>{_bytes(size)}</td></tr>"


def _bar(start: float, length: float, number: int, title: str) -> str:
    return (
        f"<i title='{escape(title)}' style='left:{100 * start:.3f}%;width:{100 * length:.3f}%;"
        f"background:{_colour(number)}'></i>"
    )


def _colour(number: int) -> str:
    """Colours of the report's lines in turn, fainter from round to round."""
    line = f"var(--line-{number % NAMED_COLOURS + 1})"
    again = number // NAMED_COLOURS
    return line if not again else f"color-mix(in oklab, {line} {100 // (again + 1)}%, var(--page))"


def _bytes(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:.0f} B"

"""The result of a search for the terminal and as a page with its frontier. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .log.curves import Axis, short, value_axis
from .search import Found
from .search_space import Space

GIB = 2**30
HEAD = ("", "layout", "batches", "policy", "ZeRO", "GiB", "step, s", "tokens/s", "MFU")
CAPTION = (
    "layout: PP/VPP/EP/CP/DP; batches: micro-batches x samples; g, o: gradients, optimizer off the device"
)
SIDE = 1000


def render(rows: Sequence[dict[str, Any]], found: Found, space: Space) -> RenderableType:
    """A table of the best, and why."""
    table = Table(title=_title(found, space), title_justify="left", caption=CAPTION)
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("layout", "policy", "ZeRO") else "right")
    for number, row in enumerate(rows, start=1):
        table.add_row(str(number), *_cells(row))
    lines = [f"{number}. {line}" for number, row in enumerate(rows, start=1) for line in row["reasons"]]
    return Group(table, Text("\n".join(lines)))


def _title(found: Found, space: Space) -> str:
    return (
        f"{space.gpus} GPUs, {space.tokens:,} tokens a step ({space.samples:,} sequences of "
        f"{space.config.data.sequence_length:,}), {found.limit / GIB:.4g} GiB a rank; "
        f"{found.bounded:,} layouts, {found.fitting:,} may fit, {found.planned:,} planned"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    layout, states = row["layout"], row["layout"]["states"]
    away = "".join(name[0] for name in ("gradients", "optimizer") if states[name] != "device")
    sides = ("pipeline", "virtual", "expert", "context", "data")
    return [
        "/".join(str(layout[side]) for side in sides),
        f"{layout['microbatches']}x{layout['size']}",
        layout["policy"],
        f"{states['zero']} {away}".strip(),
        f"{row['memory_bytes'] / GIB:.1f}",
        f"{row['step_seconds']:.4g}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu']:.1%}",
    ]


def page(rows: Sequence[dict[str, Any]], found: Found, space: Space) -> str:
    """An HTML page: every planned layout by memory and time, and the best ones."""
    style = (resources.files(f"{__package__}.log") / "assets" / "report.css").read_text()
    head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in [str(number), *_cells(row)]) + "</tr>"
        for number, row in enumerate(rows, start=1)
    )
    why = "".join(
        f"<li>{number}. {escape(line)}</li>"
        for number, row in enumerate(rows, start=1)
        for line in row["reasons"]
    )
    commands = "".join(f"<li><code>{escape(row['command']['train'])}</code></li>" for row in rows)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Layouts</title>\n'
        f"<style>\n{style}</style></head>\n<body><main><h1>{escape(_title(found, space))}</h1>"
        f"{_scatter(found)}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<ul>{why}</ul><ol>{commands}</ol></main></body></html>\n"
    )


def _scatter(found: Found) -> str:
    """GiB of the fullest rank against seconds of a step; the best layouts are filled."""
    points = [(each.bytes / GIB, each.step.seconds, each) for each in found.tried.values() if each.step]
    x = value_axis([held for held, _, _ in points], log=False)
    y = value_axis([spent for _, spent, _ in points], log=False)
    dots = "".join(
        f'<circle cx="{x.place(held) * SIDE:.1f}" cy="{(1 - y.place(spent)) * SIDE:.1f}" r="8" '
        f'fill="{"currentColor" if each in found.best else "none"}" stroke="currentColor">'
        f"<title>{held:.1f} GiB, {spent:.4g} s</title></circle>"
        for held, spent, each in points
    )
    return (
        '<figure class="panel"><figcaption><h3>Seconds of a step over GiB of a rank</h3></figcaption>'
        f'<svg viewBox="-80 -20 {SIDE + 120} {SIDE + 100}" role="img" width="640">'
        f"{dots}{_ticks(x, down=False)}{_ticks(y, down=True)}</svg></figure>"
    )


def _ticks(axis: Axis, *, down: bool) -> str:
    found = []
    for tick in axis.ticks():
        place = axis.place(tick) * SIDE
        left, top = (-70.0, SIDE - place) if down else (place, SIDE + 50.0)
        found.append(
            f'<text x="{left:.1f}" y="{top:.1f}" font-size="28" fill="currentColor">{short(tick)}</text>'
        )
    return "".join(found)

"""Charts of the report page as HTML: lines as stretched SVG, labels as text placed in per cent.

A chart therefore fits any width without scripts; the page's script adds the read-out and the log switch.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .curves import MAX_POINTS, SMOOTH_FROM, Axis, Point, Series, downsample, short, smooth, value_axis
from .panels import Panel

SIDE = 1000
NAMED_COLOURS = 8
Border = tuple[float, str]
"""Step at which a stage of the run begins, and its name."""
MAX_COLUMNS = 240
PANEL_POINTS = 16_000


def panel_figure(
    panel: Panel, series: Sequence[Series], steps: tuple[int, int], borders: Sequence[Border] = ()
) -> str:
    """One panel as a <figure>; `steps` are the first and the last step of the run's step axis."""
    drawn = [line for line in series if line.points]
    notes = [
        f"{line.nonfinite:,} value{'s' if line.nonfinite != 1 else ''} of {line.name} not finite, not drawn"
        for line in series
        if line.nonfinite
    ]
    note = f'<p class="note">{escape("; ".join(notes))}</p>' if notes else ""
    title = f'<h3>{escape(panel.title)} <span class="unit">{escape(panel.unit)}</span></h3>'
    if not drawn:
        return f'<figure class="panel">{title}{note}</figure>'
    x = Axis(*steps) if steps[1] > steps[0] else Axis(steps[0] - 1, steps[0] + 1)
    values = [value for line in drawn for _, value in line.points]
    scales = ["linear", "log"] if min(values) > 0 else ["linear"]
    chosen = panel.scale if panel.scale in scales else "linear"
    axes = {scale: value_axis(values, log=scale == "log") for scale in scales}
    ramp = len(drawn) > (3 if panel.by_layer else NAMED_COLOURS)
    colours = [
        colour(line.place if line.run else index, len(drawn), ramp) for index, line in enumerate(drawn)
    ]
    layers = "".join(scale_layer(panel, drawn, colours, x, axes[scale]) for scale in scales)
    return (
        f'<figure class="panel" data-scale="{chosen}">'
        f"<figcaption>{title}{switch(chosen) if len(scales) > 1 else ''}</figcaption>"
        f'{legend(drawn, colours, ramp)}<div class="plot">{layers}{border_marks(borders, x)}{step_ticks(x)}'
        '<div class="cursor"></div><div class="readout"></div></div>'
        f"{note}{readout_data(drawn, colours, x, axes)}</figure>"
    )


def border_marks(borders: Sequence[Border], x: Axis) -> str:
    """A line with a name where each stage begins."""
    return "".join(
        f'<span class="border" style="left:{x.place(step) * 100:.2f}%">{escape(name)}</span>'
        for step, name in borders
    )


def switch(chosen: str) -> str:
    """Two buttons that choose the scale of the value axis."""
    buttons = "".join(
        f'<button type="button" class="scale" data-to="{scale}" '
        f'aria-pressed="{"true" if scale == chosen else "false"}">{scale}</button>'
        for scale in ("linear", "log")
    )
    return f'<span class="switch" role="group" aria-label="Scale of the value axis">{buttons}</span>'


def scale_layer(panel: Panel, drawn: Sequence[Series], colours: Sequence[str], x: Axis, y: Axis) -> str:
    """Grid, lines and value labels of a panel on one value axis."""
    scale = "log" if y.log else "linear"
    ticks = y.ticks()
    grid = "".join(
        f'<line x1="0" x2="{SIDE}" y1="{(1 - y.place(t)) * SIDE:.1f}" y2="{(1 - y.place(t)) * SIDE:.1f}"/>'
        for t in ticks
    )
    labels = "".join(
        f'<span class="y" style="top:{(1 - y.place(t)) * 100:.2f}%">{short(t)}</span>' for t in ticks
    )
    limit = point_limit(len(drawn))
    lines = "".join(
        line_paths(panel, line, stroke, x, y, limit) for line, stroke in zip(drawn, colours, strict=True)
    )
    many = " many" if len(drawn) > NAMED_COLOURS else ""
    return (
        f'<div class="layer {scale}"><svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(panel.title)}, {scale} scale">'
        f'<g class="grid">{grid}</g><g class="lines{many}">{lines}</g></svg>{labels}</div>'
    )


def line_paths(panel: Panel, line: Series, stroke: str, x: Axis, y: Axis, limit: int) -> str:
    """The line of one metric: raw and faint below its moving average where the panel asks for that."""
    style = f'style="stroke:{stroke}"{of_run(line)}'
    raw = path(downsample(line.points, limit), x, y)
    if panel.smooth and len(line.points) >= SMOOTH_FROM:
        average = path(downsample(smooth(line.points), limit), x, y)
        return f'<path class="raw" {style} d="{raw}"/><path {style} d="{average}"/>'
    return f'<path {style} d="{raw}"/>'


def of_run(line: Series) -> str:
    """The attribute by which the page's script hides a run."""
    return f' data-run="{line.place}"' if line.run else ""


def point_limit(lines: int) -> int:
    """Points that one of so many lines may have, so that a model of many layers keeps a page of a few MB."""
    return min(MAX_POINTS, max(200, PANEL_POINTS // lines))


def path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """SVG path data; a single point becomes a dot by way of round line ends."""
    places = [f"{x.place(s) * SIDE:.1f} {(1 - y.place(v)) * SIDE:.1f}" for s, v in points]
    return f"M{places[0]}h0.01" if len(places) == 1 else "M" + "L".join(places)


def colour(index: int, count: int, ramp: bool) -> str:
    """A colour of its own for each of a few lines, or a place on a ramp for lines in an order."""
    if not ramp:
        return f"var(--line-{index + 1})"
    share = 100 * index / (count - 1)
    return f"color-mix(in oklab, var(--ramp-b) {share:.0f}%, var(--ramp-a))"


def legend(drawn: Sequence[Series], colours: Sequence[str], ramp: bool) -> str:
    """Names of the lines; the ends of a ramp; nothing for a single line, which the title names."""
    if len(drawn) == 1 and not drawn[0].run:
        return ""
    names = [escape(line.run or label(line.name)) for line in drawn]
    if ramp:
        return f'<p class="legend">{names[0]}<i class="ramp"></i>{names[-1]}</p>'
    keys = (
        f'<span{of_run(line)}><i style="background:{colour}"></i>{name}</span>'
        for colour, name, line in zip(colours, names, drawn, strict=True)
    )
    return f'<p class="legend">{"".join(keys)}</p>'


def label(name: str) -> str:
    """The last part of a metric's name, in words and without the unit that the panel names."""
    return name.rsplit("/", 1)[-1].removesuffix("_gib").replace("_", " ")


def step_ticks(x: Axis) -> str:
    # Steps are whole numbers, so short axes have fewer ticks rather than halves.
    ticks = [tick for tick in x.ticks(6) if float(tick).is_integer()]
    return "".join(f'<span class="x" style="left:{x.place(t) * 100:.2f}%">{short(t)}</span>' for t in ticks)


def readout_data(drawn: Sequence[Series], colours: Sequence[str], x: Axis, axes: dict[str, Axis]) -> str:
    """What the script needs to tell values under the pointer."""
    limit = point_limit(len(drawn))
    data = {
        "x": [x.low, x.high],
        "y": {scale: [axis.low, axis.high] for scale, axis in axes.items()},
        "series": [
            {
                "name": line.run or label(line.name),
                "run": line.place if line.run else None,
                "colour": stroke,
                "points": [[step, float(f"{value:.6g}")] for step, value in downsample(line.points, limit)],
            }
            for line, stroke in zip(drawn, colours, strict=True)
        ],
    }
    return script_json(data)


def script_json(data: object) -> str:
    """JSON inside a <script>, which no tag or comment in a name may end or change."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


@dataclass(frozen=True)
class HeatMap:
    """Greatest value of each layer in each span of steps; None where there is none."""

    rows: list[list[float | None]]
    names: list[str]
    steps: list[int]


def heat_map(series: Sequence[Series], max_columns: int = MAX_COLUMNS) -> HeatMap:
    """Reduce the layers' series to a grid of at most `max_columns` spans. Rows keep the order of `series`."""
    steps = sorted({step for line in series for step, _ in line.points})
    columns = min(max_columns, len(steps))
    column_of = {step: index * columns // len(steps) for index, step in enumerate(steps)}
    rows: list[list[float | None]] = []
    for line in series:
        row: list[float | None] = [None] * columns
        for step, value in line.points:
            before = row[column_of[step]]
            row[column_of[step]] = value if before is None else max(before, value)
        rows.append(row)
    firsts = [int(steps[-(-index * len(steps) // columns)]) for index in range(columns)]
    return HeatMap(rows, [label(line.name) for line in series], firsts)


def heat_figure(title: str, grid: HeatMap, low: float, high: float) -> str:
    """The grid as a <figure>: an image of opacity alone, so that one suits light and dark pages."""
    image = base64.b64encode(alpha_png(grid.rows, low, high)).decode()
    every = max(1, -(-len(grid.names) // 12))
    names = "".join(
        f'<span style="top:{(i + 0.5) / len(grid.names) * 100:.2f}%">{escape(name)}</span>'
        for i, name in enumerate(grid.names)
        if i % every == 0
    )
    rows = [[None if value is None else float(f"{value:.4g}") for value in row] for row in grid.rows]
    data = script_json({"steps": grid.steps, "names": grid.names, "rows": rows})
    height = max(120, min(420, 18 * len(grid.names)))
    return (
        f'<figure class="panel heat"><figcaption><h3>{escape(title)} <span class="unit">max over mean, '
        f"worst of each span of steps</span></h3></figcaption>"
        f'<p class="legend"><span>{short(low)}</span><i class="heat-ramp"></i>'
        f"<span>{short(high)} and more</span></p>"
        f'<div class="grid-wrap" style="height:{height}px"><div class="names">{names}</div>'
        f'<div class="cells"><img alt="{escape(title)} and step" src="data:image/png;base64,{image}">'
        f'<div class="readout"></div></div></div>'
        f'<p class="ends"><span>step {grid.steps[0]:,}</span><span>{grid.steps[-1]:,}</span></p>'
        f"{data}</figure>"
    )


def alpha_png(rows: Sequence[Sequence[float | None]], low: float, high: float) -> bytes:
    """A PNG of one warm colour whose opacity runs from faint at `low` to full at `high`; None is clear."""
    span = (high - low) or 1.0
    scanlines = bytearray()
    for row in rows:
        scanlines.append(0)
        for value in row:
            share = 0.0 if value is None else 0.04 + 0.96 * min(1.0, max(0.0, (value - low) / span))
            scanlines += bytes((0xD9, 0x5F, 0x0E, round(255 * share)))
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(bytes(scanlines), 9))
        + png_chunk(b"IEND", b"")
    )


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

"""Pictures of a timeline: SVG, PNG, a page of both, and Chrome's trace format. Imports no torch.

Each rank is a row; boxes are operations, coloured by kind and shaded by chunk (or by part, for the vision
tower); the row's empty stretches are the bubble. Times are in `unit`: "s" for seconds, "units" where the
costs were mere proportions.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from .simulate import Timeline
from .table import (
    BACKWARD,
    FORWARD,
    PREFETCH,
    REDUCE,
    RELEASE,
    VISION_BACKWARD,
    VISION_FORWARD,
    WEIGHT,
    Op,
)

NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHT: "weight gradients",
    VISION_FORWARD: "vision forward",
    VISION_BACKWARD: "vision backward",
    REDUCE: "gradient sum",
    PREFETCH: "prefetch",
    RELEASE: "release",
}
# First and last shade of each kind, between the chunks; they stand out on white and on near-black.
SHADES = {
    FORWARD: ("#a9c9f3", "#2f66b3"),
    BACKWARD: ("#a5dbb1", "#23804a"),
    WEIGHT: ("#f3d58c", "#b97f14"),
    VISION_FORWARD: ("#dcbcf3", "#8a4fb5"),
    VISION_BACKWARD: ("#f4b6c8", "#b53f66"),
    REDUCE: ("#b4b9c0", "#6d747d"),
    PREFETCH: ("#9ad9dc", "#1c8087"),
    RELEASE: ("#d8c3a8", "#8d6b3d"),
}
# Paper, text, fainter text, empty stretch of a row, rule: on a light page and on a dark one.
LIGHT = {"paper": "#ffffff", "ink": "#1d1c1a", "soft": "#6b6862", "empty": "#eceae5", "rule": "#d5d2ca"}
DARK = {"paper": "#131416", "ink": "#ecebe7", "soft": "#9b9a95", "empty": "#26292e", "rule": "#3b3f45"}

LEFT, RIGHT, TOP, BOTTOM = 64, 76, 64, 36
BOX_WIDTH, NARROWEST, WIDEST = 30, 960, 3200
"""Pixels that an operation gets on average, and the least and the most that the time axis gets."""
TITLED_BOXES = 5000
"""Boxes beyond which an SVG draws one path a colour, without the texts that appear under the pointer."""
THINNEST = 0.5
"""Boxes narrower than this many pixels are merged with their neighbours in the colour that prevails."""
MOST_BOXES = 80_000
"""What the merging keeps a picture below: about 2 MB of SVG."""
DIGIT = 6.6
MICRO = 1e6


class Box(NamedTuple):
    """A coloured rectangle; `ops` operations are in it, more than one where they would be too thin."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    label: str
    title: str
    ops: int


class Text(NamedTuple):
    """A line of text; `anchor` is start, middle or end, `style` a key of `LIGHT`."""

    x: float
    y: float
    content: str
    anchor: str
    style: str


class Bar(NamedTuple):
    """A rectangle of the page's own colours; `style` is a key of `LIGHT`."""

    x: float
    y: float
    width: float
    height: float
    style: str


@dataclass(frozen=True)
class Drawing:
    """What both renderers draw, in pixels from the top left corner: bars, then boxes, then texts."""

    width: float
    height: float
    bars: list[Bar]
    boxes: list[Box]
    texts: list[Text]


def svg(timeline: Timeline, *, unit: str = "units", title: str = "", inline: bool = False) -> str:
    """The picture as SVG; `inline` for use inside an HTML page, without the name space of a file."""
    drawing = _drawing(timeline, unit, title)
    space = "" if inline else ' xmlns="http://www.w3.org/2000/svg"'
    size = f'width="{drawing.width:.0f}" height="{drawing.height:.0f}"'
    view = f'viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}"'
    bars = "".join(
        f'<rect class="tl-{bar.style}" x="{bar.x:.2f}" y="{bar.y:.1f}" width="{bar.width:.2f}"'
        f' height="{bar.height:.1f}"/>'
        for bar in drawing.bars
    )
    texts = "".join(
        f'<text class="tl-{text.style}" x="{text.x:.1f}" y="{text.y:.1f}" text-anchor="{text.anchor}">'
        f"{escape(text.content)}</text>"
        for text in drawing.texts
    )
    paper = "" if inline else '<rect class="tl-paper" width="100%" height="100%"/>'
    return (
        f'<svg{space} class="timeline" {size} {view} role="img" aria-label="pipeline timeline">'
        f"<style>{_style()}</style>{paper}{bars}{_svg_boxes(drawing.boxes)}{texts}</svg>\n"
    )


def png(timeline: Timeline, *, unit: str = "units", title: str = "") -> bytes:
    """The picture as a PNG on white, at twice the SVG's size where that is at most 4096 pixels wide."""
    from PIL import Image, ImageDraw, ImageFont

    drawing = _drawing(timeline, unit, title)
    scale = 2 if 2 * drawing.width <= 4096 else 1
    image = Image.new("RGB", (round(drawing.width * scale), round(drawing.height * scale)), LIGHT["paper"])
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(11 * scale)
    for bar in drawing.bars:
        canvas.rectangle(_corners(bar, scale), fill=LIGHT[bar.style])
    for box in drawing.boxes:
        canvas.rectangle(_corners(box, scale), fill=box.colour)
        if box.label:
            middle = (box.x + box.width / 2) * scale, (box.y + box.height / 2) * scale
            canvas.text(middle, box.label, fill=_ink(box.colour), font=font, anchor="mm")
    sides = {"start": "l", "middle": "m", "end": "r"}
    for text in drawing.texts:
        place = text.x * scale, text.y * scale
        canvas.text(place, text.content, fill=LIGHT[text.style], font=font, anchor=f"{sides[text.anchor]}s")
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def chrome_trace(timeline: Timeline, *, unit: str = "units") -> dict[str, Any]:
    """The timeline for https://ui.perfetto.dev: one thread a rank, one complete event an operation.

    Times are microseconds; where costs are mere units, one unit is a millisecond.
    """
    factor = MICRO if unit == "s" else MICRO / 1000
    layout = timeline.table.layout
    events: list[dict[str, Any]] = [_meta("process_name", 0, {"name": f"pipeline, {timeline.table.name}"})]
    for rank, ops in enumerate(timeline.table.ranks):
        events.append(_meta("thread_name", rank, {"name": f"rank {rank}"}))
        events.append(_meta("thread_sort_index", rank, {"sort_index": rank}))
        for op, start, end in zip(ops, timeline.starts[rank], timeline.ends[rank], strict=True):
            begun = round(float(start) * factor, 3)
            arguments: dict[str, Any] = {"kind": op.kind, "chunk": op.chunk, "microbatch": op.microbatch}
            if op.kind in (FORWARD, BACKWARD, WEIGHT):
                arguments["stage"] = layout.stage(rank, op.chunk)
            events.append(
                {
                    "name": str(op),
                    "cat": NAMES[op.kind],
                    "ph": "X",
                    "ts": begun,
                    "dur": max(0.0, round(float(end) * factor - begun, 3)),
                    "pid": 0,
                    "tid": rank,
                    "args": arguments,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def html(
    timelines: Mapping[str, Timeline],
    summary: Sequence[tuple[str, str]] = (),
    *,
    unit: str = "units",
    more: Mapping[str, str] | None = None,
) -> str:
    """One page without scripts or outside resources: the pictures one under another, then idle time by rank.

    `timelines` are titles and timelines, such as "planned" and "measured"; `summary` are names and values;
    `more` are titles and inline SVG of other pictures.
    """
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in summary)
    pictures = "".join(
        f"<h2>{escape(name)}</h2><div class='wide'>{svg(timeline, unit=unit, inline=True)}</div>"
        for name, timeline in timelines.items()
    )
    pictures += "".join(
        f"<h2>{escape(name)}</h2><div class='wide'>{picture}</div>" for name, picture in (more or {}).items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Pipeline timeline</title>'
        f"<style>{_page_style()}</style></head>\n<body><h1>Pipeline timeline</h1>"
        f"{f'<table>{facts}</table>' if facts else ''}{pictures}"
        f"<h2>Idle time by rank</h2>{idle_table(timelines, unit=unit)}</body></html>\n"
    )


def idle_table(timelines: Mapping[str, Timeline], *, unit: str = "units") -> str:
    """An HTML table of each rank's idle time, and its share of the whole, in every timeline."""
    head = "".join(f"<th>{escape(name)}: idle</th><th>share</th>" for name in timelines)
    ranks = max(len(timeline.table.ranks) for timeline in timelines.values())
    rows = []
    for rank in range(ranks):
        cells = "".join(
            f"<td>{duration(timeline.idle(rank), unit)}</td><td>{idle_share(timeline, rank):.1%}</td>"
            for timeline in timelines.values()
        )
        rows.append(f"<tr><td>{rank}</td>{cells}</tr>")
    return f"<table><thead><tr><th>rank</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def idle_share(timeline: Timeline, rank: int) -> float:
    """Idle time of a rank over the time of the whole."""
    whole = float(timeline.makespan)
    return float(timeline.idle(rank)) / whole if whole else 0.0


def duration(value: Any, unit: str) -> str:
    """A time for a person: seconds in s, ms or µs, units as they are."""
    number = float(value)
    if unit != "s":
        return f"{number:,.6g} units"
    factor, name = _time_scale(abs(number))
    return f"{number * factor:.4g} {name}"


def _drawing(timeline: Timeline, unit: str, title: str) -> Drawing:
    ranks = timeline.table.ranks
    longest = max(map(len, ranks))
    axis = min(WIDEST, max(NARROWEST, BOX_WIDTH * longest))
    height = 30 if len(ranks) <= 8 else 22
    makespan = float(timeline.makespan)
    scale = axis / makespan if makespan else 0.0
    bottom = TOP + len(ranks) * (height + 4)
    bars, boxes, texts = [], [], [Text(LEFT, 18, title or _headline(timeline, unit), "start", "ink")]
    shades = _Shades(timeline)
    pen = _Pen(scale, max(THINNEST, axis * len(ranks) / MOST_BOXES), unit, shades)
    for rank in range(len(ranks)):
        y = TOP + rank * (height + 4)
        bars.append(Bar(LEFT, y, axis, height, "empty"))
        boxes += _row(timeline, rank, (y, height), pen)
        texts.append(Text(LEFT - 10, y + height / 2 + 4, f"rank {rank}", "end", "soft"))
        share = f"idle {idle_share(timeline, rank):.1%}"
        texts.append(Text(LEFT + axis + 8, y + height / 2 + 4, share, "start", "soft"))
    for x, label in _ticks(makespan, scale, unit):
        bars.append(Bar(x, bottom, 1, 5, "rule"))
        texts.append(Text(x, bottom + 18, label, "middle", "soft"))
    legend, names = shades.legend()
    return Drawing(LEFT + axis + RIGHT, bottom + BOTTOM, bars, [*boxes, *legend], [*texts, *names])


class _Shades:
    """Colours of the operations of one timeline."""

    def __init__(self, timeline: Timeline) -> None:
        chunks: defaultdict[str, set[int]] = defaultdict(set)
        for ops in timeline.table.ranks:
            for op in ops:
                chunks[op.kind].add(op.chunk)
        self.chunks = {kind: sorted(chunks[kind]) for kind in SHADES if kind in chunks}
        self._colours = {
            (kind, chunk): _mix(*SHADES[kind], place / max(1, len(numbers) - 1))
            for kind, numbers in self.chunks.items()
            for place, chunk in enumerate(numbers)
        }

    def __getitem__(self, op: Op) -> str:
        return self._colours[op.kind, op.chunk]

    def legend(self) -> tuple[list[Box], list[Text]]:
        """Swatches of each kind, one a chunk, and the kind's name behind them."""
        boxes, texts, x = [], [], float(LEFT)
        for kind, chunks in self.chunks.items():
            step = 16 if len(chunks) <= 8 else 5
            for chunk in chunks:
                label = str(chunk) if 1 < len(chunks) <= 8 and chunk >= 0 else ""
                boxes.append(Box(x, 30, step - 1, 14, self._colours[kind, chunk], label, "", 0))
                x += step
            part = "part" if kind in (VISION_FORWARD, VISION_BACKWARD) else "chunk"
            name = NAMES[kind] if len(chunks) == 1 else f"{NAMES[kind]}, {part} {chunks[0]} to {chunks[-1]}"
            texts.append(Text(x + 6, 41, name, "start", "soft"))
            x += 6 + DIGIT * len(name) + 20
        return boxes, texts


class _Pen(NamedTuple):
    """How operations become boxes: pixels of a unit of time, the least width, unit of time, colours."""

    scale: float
    thinnest: float
    unit: str
    shades: _Shades


Place = tuple[float, float]
"""Top and height of a row."""
Span = tuple[Op, float, float]
"""An operation, its start and its end."""


def _row(timeline: Timeline, rank: int, place: Place, pen: _Pen) -> list[Box]:
    """Boxes of one rank; what would be too thin is gathered until it is not."""
    boxes: list[Box] = []
    gathered: list[Span] = []

    def flush() -> None:
        if gathered:
            boxes.append(_box(gathered, place, pen))
            gathered.clear()

    ops = timeline.table.ranks[rank]
    for op, begun, ended in zip(ops, timeline.starts[rank], timeline.ends[rank], strict=True):
        start, end = float(begun), float(ended)
        apart = gathered and (start - gathered[-1][2]) * pen.scale >= pen.thinnest
        if apart or (end - start) * pen.scale >= pen.thinnest:
            flush()
        gathered.append((op, start, end))
        if (end - gathered[0][1]) * pen.scale >= pen.thinnest:
            flush()
    flush()
    return boxes


def _box(gathered: Sequence[Span], place: Place, pen: _Pen) -> Box:
    spent: defaultdict[str, float] = defaultdict(float)
    for op, start, end in gathered:
        spent[pen.shades[op]] += end - start
    op, start, end = gathered[0][0], gathered[0][1], gathered[-1][2]
    width = (end - start) * pen.scale
    number = str(op.microbatch) if op.kind != REDUCE else ""
    part = "part" if op.kind in (VISION_FORWARD, VISION_BACKWARD) else "chunk"
    return Box(
        LEFT + start * pen.scale,
        place[0],
        width,
        place[1],
        max(spent, key=spent.__getitem__),
        number if len(gathered) == 1 and width >= DIGIT * len(number) + 3 else "",
        f"{NAMES[op.kind]}, {part} {op.chunk}, micro-batch {op.microbatch}, "
        f"from {duration(start, pen.unit)} for {duration(end - start, pen.unit)}",
        len(gathered),
    )


def _svg_boxes(boxes: Sequence[Box]) -> str:
    """Boxes by colour: rectangles with a text under the pointer while there are few, else one path."""
    by_colour: defaultdict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        by_colour[box.colour].append(box)
    shape: Callable[[Sequence[Box]], str] = _rectangles if len(boxes) <= TITLED_BOXES else _path
    return "".join(
        f'<g fill="{colour}">{shape(same)}{_labels(same)}</g>' for colour, same in by_colour.items()
    )


def _rectangles(boxes: Sequence[Box]) -> str:
    return "".join(
        f'<rect class="tl-op" x="{box.x:.2f}" y="{box.y:.1f}" width="{_inner(box):.2f}"'
        f' height="{box.height:.1f}"><title>{escape(box.title)}</title></rect>'
        if box.ops
        else f'<rect x="{box.x:.2f}" y="{box.y:.1f}" width="{box.width:.2f}" height="{box.height:.1f}"/>'
        for box in boxes
    )


def _path(boxes: Sequence[Box]) -> str:
    steps = (f"M{box.x:.2f} {box.y:g}h{_inner(box):.2f}v{box.height:g}h-{_inner(box):.2f}z" for box in boxes)
    return f'<path d="{"".join(steps)}"/>'


def _labels(boxes: Sequence[Box]) -> str:
    labelled = [box for box in boxes if box.label]
    if not labelled:
        return ""
    texts = "".join(
        f'<text x="{box.x + box.width / 2:.2f}" y="{box.y + box.height / 2 + 4:.1f}">{box.label}</text>'
        for box in labelled
    )
    return f'<g class="tl-number" fill="{_ink(labelled[0].colour)}">{texts}</g>'


def _inner(box: Box) -> float:
    """Width that leaves a hair of the background between boxes wide enough for it."""
    return box.width - 0.6 if box.width > 4 else box.width


def _corners(shape: Box | Bar, scale: int) -> tuple[float, float, float, float]:
    """Whole pixels, both ends included, of which Pillow fills at least one."""
    left, top = round(shape.x * scale), round(shape.y * scale)
    hair = 1 if shape.width > 4 else 0
    right = round((shape.x + shape.width) * scale) - 1 - hair
    return left, top, max(left, right), max(top, round((shape.y + shape.height) * scale) - 1)


def _headline(timeline: Timeline, unit: str) -> str:
    layout, table = timeline.table.layout, timeline.table
    return (
        f"{table.name}: {_plural(layout.pipeline, 'rank')}, {_plural(layout.virtual, 'chunk')} each, "
        f"{_plural(layout.microbatches, 'micro-batch')}; {duration(timeline.makespan, unit)}, "
        f"bubble {float(timeline.bubble_over_compute):.1%} of compute"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('h') else 's'}"


def _ticks(makespan: float, scale: float, unit: str) -> list[tuple[float, str]]:
    """Places and labels of round times about 100 pixels apart."""
    if not makespan:
        return []
    factor, name = _time_scale(makespan) if unit == "s" else (1.0, "")
    rough = 100 / scale * factor
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
    count = int(makespan * factor / step + 1e-9)
    return [
        (LEFT + number * step / factor * scale, f"{number * step:.6g} {name}".rstrip())
        for number in range(count + 1)
    ]


def _time_scale(seconds: float) -> tuple[float, str]:
    if seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _mix(first: str, last: str, share: float) -> str:
    pairs = zip(_channels(first), _channels(last), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def _ink(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = _channels(colour)
    return "#14161a" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "#ffffff"


def _meta(name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": thread, "args": arguments}


def _style() -> str:
    """Classes begin with tl-, since a style inside an HTML page holds for all of it."""
    light, dark = (
        "".join(f".tl-{name}{{fill:{colour}}}" for name, colour in colours.items())
        for colours in (LIGHT, DARK)
    )
    return (
        ".timeline text{font:11px ui-sans-serif,system-ui,sans-serif}.tl-number{text-anchor:middle;"
        f"pointer-events:none}}{light}@media (prefers-color-scheme: dark){{{dark}}}"
    )


def _page_style() -> str:
    return (
        ":root{color-scheme:light dark}body{margin:0;padding:28px;font:14px/1.5 ui-sans-serif,system-ui,"
        f"sans-serif;background:{LIGHT['paper']};color:{LIGHT['ink']}}}h1{{font-size:24px}}h2{{font-size:17px}}"
        ".wide{overflow-x:auto}table{border-collapse:collapse}td,th{padding:3px 16px 3px 0;text-align:left;"
        "font-variant-numeric:tabular-nums;font-weight:400}"
        f"@media (prefers-color-scheme: dark){{body{{background:{DARK['paper']};color:{DARK['ink']}}}}}"
    )

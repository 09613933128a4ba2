"""What ranks hold over a step, by place, as stacked areas in SVG: one row for each rank. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from parallel.pipeline.draw import duration

from .curves import Axis

# Bottom to top: what uses device memory first. Colours stand out on white and on near-black.
COLOURS = {
    "device": "#2f66b3",
    "fp8": "#8a4fb5",
    "window": "#a9c9f3",
    "lent": "#6d747d",
    "host": "#e08a2e",
    "peer": "#23804a",
    "nvme": "#b53f66",
}
NAMES = {
    "device": "device, as saved",
    "fp8": "device, block-FP8",
    "window": "brought back",
    "lent": "lent to a peer",
    "host": "host memory",
    "peer": "peer's memory",
    "nvme": "NVMe",
}
LEFT, RIGHT, TOP, ROW, GAP, WIDTH = 76, 24, 48, 96, 22, 960
"""Pixels."""


@dataclass(frozen=True)
class Series:
    """Bytes of one rank by place: `held[place][i]` from `times[i]` on, seconds or units."""

    times: Sequence[float]
    held: Mapping[str, Sequence[float]]

    def peak(self, place: str) -> float:
        """The most of one place."""
        return max(self.held.get(place, ()), default=0)

    @property
    def places(self) -> list[str]:
        """Those that ever hold anything, in the order of the stack."""
        known = [place for place in COLOURS if self.peak(place)]
        return known + [place for place in self.held if place not in COLOURS and self.peak(place)]


def svg(rows: Mapping[str, Series], end: float, *, unit: str = "s", inline: bool = False) -> str:
    """Rows of stacked areas over the time from 0 to `end`, all on one scale of bytes."""
    places = list(dict.fromkeys(place for series in rows.values() for place in series.places))
    most = max(
        (max(map(sum, _columns(series, places, end)), default=0) for series in rows.values()), default=0
    )
    height = TOP + len(rows) * (ROW + GAP) + GAP
    scale, name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    axis = Axis(0, most / scale or 1)
    content = [_legend(places)]
    for number, (title, series) in enumerate(rows.items()):
        top = TOP + number * (ROW + GAP)
        content += [_frame(title, axis, name, top), _areas(series, places, end, axis, scale, top)]
    content.append(_times(end, unit, height - GAP))
    space = "" if inline else ' xmlns="http://www.w3.org/2000/svg"'
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{height}" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}"'
    paper = "" if inline else '<rect class="st-paper" width="100%" height="100%"/>'
    return (
        f'<svg{space} class="stack" {size} role="img" aria-label="bytes held over a step">'
        f"<style>{_style()}</style>{paper}{''.join(content)}</svg>\n"
    )


def _columns(series: Series, places: Sequence[str], end: float) -> list[tuple[float, ...]]:
    """The most that each place holds within each pixel of time; what stands at a moment lasts to the next."""
    columns = [[0.0] * len(places) for _ in range(WIDTH)]
    bounds = [*series.times, end]
    for index in range(len(series.times)):
        first = min(WIDTH - 1, max(0, int(bounds[index] / end * WIDTH))) if end else 0
        last = min(WIDTH - 1, max(first, int(bounds[index + 1] / end * WIDTH))) if end else WIDTH - 1
        values = [series.held[place][index] if place in series.held else 0 for place in places]
        total = sum(values)
        for column in range(first, last + 1):
            if total >= sum(columns[column]):
                columns[column] = list(values)
    return [tuple(column) for column in columns]


def _areas(series: Series, places: Sequence[str], end: float, axis: Axis, scale: float, top: float) -> str:
    columns = _columns(series, places, end)
    below = [0.0] * WIDTH
    drawn = []
    for number, place in enumerate(places):
        above = [low + column[number] / scale for low, column in zip(below, columns, strict=True)]
        if any(column[number] for column in columns):
            title = f"{NAMES.get(place, place)}: at most {series.peak(place) / scale:.2f}"
            colour = COLOURS.get(place, "#8d6b3d")
            path = _outline(below, above, axis, top)
            drawn.append(f'<path fill="{colour}" d="{path}"><title>{escape(title)}</title></path>')
        below = above
    return "".join(drawn)


def _outline(below: Sequence[float], above: Sequence[float], axis: Axis, top: float) -> str:
    def edge(values: Sequence[float]) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for column, value in enumerate(values):
            y = top + (1 - axis.place(value)) * ROW
            if not points or points[-1][1] != y:
                points += [(LEFT + column, points[-1][1])] if points else []
                points.append((LEFT + column, y))
        return [*points, (LEFT + WIDTH, points[-1][1])]

    outline = [*edge(above), *reversed(edge(below))]
    return "M" + "L".join(f"{x:.0f} {y:.1f}" for x, y in outline) + "Z"


def _frame(title: str, axis: Axis, name: str, top: float) -> str:
    lines = "".join(
        f'<line class="st-rule" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="st-soft" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in axis.ticks(3)
        for y in [top + (1 - axis.place(tick)) * ROW]
    )
    label = f'<text class="st-ink" x="{LEFT}" y="{top - 5:.1f}">{escape(title)}, {name}</text>'
    return lines + label


def _legend(places: Sequence[str]) -> str:
    x, parts = LEFT, []
    for place in places:
        text = NAMES.get(place, place)
        parts.append(
            f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOURS.get(place, "#8d6b3d")}"/>'
            f'<text class="st-ink" x="{x + 17}" y="20">{escape(text)}</text>'
        )
        x += 40 + 7 * len(text)
    return "".join(parts)


def _times(end: float, unit: str, y: float) -> str:
    return "".join(
        f'<text class="st-soft" x="{LEFT + share * WIDTH:.0f}" y="{y:.0f}" text-anchor="{anchor}">'
        f"{duration(share * end, unit)}</text>"
        for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end"))
    )


def _style() -> str:
    return (
        ".stack{--ink:#1d1c1a;--soft:#6b6862;--rule:#d5d2ca;--paper:#ffffff;"
        "font:12px ui-sans-serif,system-ui,sans-serif}"
        "@media(prefers-color-scheme:dark){.stack{--ink:#ecebe7;--soft:#9b9a95;--rule:#3b3f45;--paper:#131416}}"
        ".st-ink{fill:var(--ink)}.st-soft{fill:var(--soft)}.st-rule{stroke:var(--rule)}"
        ".st-paper{fill:var(--paper)}"
    )

"""One self-contained HTML page about several runs: curves over each other, results, and what differs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from .charts import NAMED_COLOURS, colour, panel_figure
from .curves import Series, collect, short
from .metrics import replace_file
from .panels import PANELS, Panel, sections
from .report import (
    RunData,
    assets,
    document,
    layout,
    leaves,
    load,
    number,
    parameters,
    recent_median,
    section_html,
    table,
    when,
)

MOST = NAMED_COLOURS
"""Runs on one page, each with a colour of its own."""
MOST_EVENTS = 200
ABSENT = "-"
RATES = {"tokens_per_second": "Tokens per second", "mfu": "MFU", "time/step": "Seconds of a step"}


@dataclass(frozen=True)
class Best:
    """A metric of one run at its end, and where it was best."""

    final: float
    best: float
    step: int


def write_comparison(run_dirs: Sequence[str | os.PathLike[str]], target: Path) -> Path:
    """Write the page about 2 to `MOST` runs, the first of which the others are measured against.

    Each run directory may lack any file, as in `report.write_report`. Raises OSError when the page cannot be
    written.
    """
    assert 2 <= len(run_dirs) <= MOST
    replace_file(target, page([load(Path(folder)) for folder in run_dirs]).encode())
    return target


def page(runs: Sequence[RunData]) -> str:
    """The whole document."""
    names = names_of(runs)
    series = [collect(run.records) for run in runs]
    body = "".join(
        [
            header(runs, names),
            results(runs, names, series),
            charts(runs, names, series),
            differences(runs, names),
            event_list(runs, names),
        ]
    )
    return document(f"{escape(names[0])} and {len(names) - 1} more", body, assets("report", "compare"))


def names_of(runs: Sequence[RunData]) -> list[str]:
    """A name for each run, no two alike: its own, else its folder's, else with a number."""
    own = [str(run.key("run.name", run.folder.name)) for run in runs]
    twice = {name for name, count in Counter(own).items() if count > 1}
    shown = [str(run.folder) if name in twice else name for run, name in zip(runs, own, strict=True)]
    seen: Counter[str] = Counter()
    found = []
    for name in shown:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def header(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """The title, and a switch for each run."""
    switches = "".join(
        f'<button type="button" class="run" data-run="{place}" aria-pressed="true">'
        f'<i style="background:{colour(place, len(names), False)}"></i>{escape(name)}</button>'
        for place, name in enumerate(names)
    )
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f'<header><p class="kind">Comparison of {len(runs)} runs, {written}</p>'
        f"<h1>{' / '.join(map(escape, names))}</h1></header>"
        f'<p class="runs" role="group" aria-label="Runs shown">{switches}</p>'
    )


def results(runs: Sequence[RunData], names: Sequence[str], series: Sequence[Mapping[str, Series]]) -> str:
    """Facts, final and best values, and rates; behind each the difference to the first run."""
    facts: list[tuple[str, list[Any]]] = [
        ("Parameters", [parameters(run.summary.get("parameters")) for run in runs]),
        ("Layout", [layout(run) for run in runs]),
        ("Hardware", [run.summary.get("hardware") for run in runs]),
        ("Commit", [str(run.summary.get("git_commit") or "")[:12] for run in runs]),
        ("Steps", [f"{run.records[-1]['step']:,}" if run.records else None for run in runs]),
    ]
    rows = [(name, *(value or ABSENT for value in values)) for name, values in facts if any(values)]
    rows += [row for name in scalar_names(series) if (row := metric_row(name, series))]
    for metric, title in RATES.items():
        values = [recent_median(run, metric) for run in runs]
        if any(value is not None for value in values):
            cells = [ABSENT if v is None else short(float(f"{v:.4g}")) for v in values]
            rows.append((f"{title}, median of recent lines", *beside(cells, values)))
    return f"<section><h2>Results</h2>{wide(table(('', *names), rows))}</section>"


def scalar_names(series: Sequence[Mapping[str, Series]]) -> list[str]:
    """Metrics of the Loss and Optimizer sections that any run has, in the panels' order."""
    known = {name for each in series for name in each}
    panels = [panel for panel in PANELS if panel.section in ("Loss", "Optimizer")]
    return [name for panel in panels for name in panel.select(known)]


def metric_row(name: str, series: Sequence[Mapping[str, Series]]) -> tuple[str, ...] | None:
    """Final value, and where the panel says so the best one, of each run; None where no value is finite."""
    best = next((panel.summary for panel in PANELS if panel.select([name])), "last")
    found = [best_of(each.get(name), best) for each in series]
    if not any(found):
        return None
    finals = [None if entry is None else entry.final for entry in found]
    cells = beside([ABSENT if value is None else str(number(value)) for value in finals], finals)
    if best != "last":
        peaks = [f"; {best} {number(entry.best)} at {entry.step:,}" if entry else "" for entry in found]
        cells = [cell + peak for cell, peak in zip(cells, peaks, strict=True)]
    return (name, *cells)


def best_of(line: Series | None, best: str) -> Best | None:
    """The last finite value, and the least or greatest one."""
    if line is None or not line.points:
        return None
    choose = min if best == "min" else max
    step, value = line.points[-1] if best == "last" else choose(line.points, key=lambda point: point[1])
    return Best(line.points[-1][1], value, int(step))


def beside(cells: Sequence[str], values: Sequence[float | None]) -> list[str]:
    """The cells, those behind the first with their distance from it in per cent."""
    base = values[0]
    shown = [cells[0]]
    for cell, value in zip(cells[1:], values[1:], strict=True):
        away = f" ({100 * (value / base - 1):+.2f} %)" if base and value is not None else ""
        shown.append(cell + away)
    return shown


def charts(runs: Sequence[RunData], names: Sequence[str], series: Sequence[Mapping[str, Series]]) -> str:
    """A chart for each metric, and for layers one of the greatest of them, with a line for each run."""
    records = [record["step"] for run in runs for record in run.records]
    if not records:
        return '<h2>Curves</h2><p class="empty">No metrics have been logged yet.</p>'
    steps = (min(records), max(records))
    known = {name for each in series for name in each}
    placed: set[str] = set()
    shown = []
    for section, panels in sections().items():
        figures = []
        for panel in panels:
            chosen = panel.select(known)
            placed.update(chosen)
            for title, lines in lines_of(panel, chosen, names, series):
                figures.append(panel_figure(one(panel, title), lines, steps))
        shown.append(section_html(section, figures))
    others = [name for name in sorted(known) if name not in placed]
    figures = [
        panel_figure(Panel("Other", name, (name,)), overlaid([name], names, series), steps) for name in others
    ]
    return "".join([*shown, section_html("Other metrics", figures)])


def lines_of(
    panel: Panel, chosen: Sequence[str], names: Sequence[str], series: Sequence[Mapping[str, Series]]
) -> Iterable[tuple[str, list[Series]]]:
    """Title and lines of each chart that a panel becomes."""
    if panel.by_layer:
        if chosen:
            yield f"{panel.title}, greatest of the layers", overlaid(chosen, names, series)
        return
    for name in chosen:
        yield (
            panel.title if len(panel.metrics) == 1 and name == panel.metrics[0] else name,
            overlaid([name], names, series),
        )


def one(panel: Panel, title: str) -> Panel:
    """A panel with one line for each run."""
    return Panel(panel.section, title, (), panel.unit, panel.scale, panel.smooth, panel.summary)


def overlaid(
    metrics: Sequence[str], names: Sequence[str], series: Sequence[Mapping[str, Series]]
) -> list[Series]:
    """One line for each run that has any of `metrics`: the greatest of them at each step."""
    found = []
    for place, (name, each) in enumerate(zip(names, series, strict=True)):
        lines = [each[metric] for metric in metrics if metric in each]
        if not lines:
            continue
        greatest: dict[float, float] = {}
        for line in lines:
            for step, value in line.points:
                greatest[step] = max(value, greatest.get(step, -math.inf))
        broken = sum(line.nonfinite for line in lines)
        found.append(Series(f"{metrics[0]} of {name}", sorted(greatest.items()), broken, name, place))
    return found


def differences(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Keys of the configuration that are not the same in all runs."""
    flat = [leaves(run.config) for run in runs]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    rows = [
        (key, *(ABSENT if key not in each else shown(each[key]) for each in flat))
        for key in keys
        if any(key not in each or each[key] != flat[0].get(key) for each in flat)
    ]
    if not rows:
        return '<section><h2>Configuration</h2><p class="status">No key differs.</p></section>'
    return f"<section><h2>Keys that differ</h2>{wide(table(('Key', *names), rows))}</section>"


def shown(value: Any) -> str:
    """A value as it is written in YAML, nearly."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def event_list(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """What happened to each run, by step; the newest ones where there are very many."""
    rows: list[tuple[int, tuple[str, ...]]] = []
    for run, name in zip(runs, names, strict=True):
        for event in run.events:
            step = event.get("step")
            at = step if isinstance(step, int) else 0
            told = (when(event.get("time")), event.get("kind"), event.get("text"))
            rows.append((at, (name, f"{at:,}", *(str(part or "") for part in told))))
    if not rows:
        return ""
    rows.sort(key=lambda row: row[0])
    left = len(rows) - MOST_EVENTS
    note = f'<p class="status">{left:,} earlier ones are left out.</p>' if left > 0 else ""
    head = ("Run", "Step", "Time", "Kind", "What happened")
    body = table(head, [row for _, row in rows[-MOST_EVENTS:]])
    return f"<section><h2>Events</h2>{note}{wide(body)}</section>"


def wide(inner: str) -> str:
    """A table that scrolls on its own where the page is narrow."""
    return f'<div class="timeline-wrap wide">{inner}</div>'

"""One self-contained HTML page about a run: `run_dir/report.html`."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from parallel.pipeline import draw
from parallel.pipeline.simulate import DeadlockError

from ..config_file import load_yaml
from ..errors import UserError
from . import activations, events, metrics, needles, stacks, timeline
from .charts import Border, heat_figure, heat_map, panel_figure
from .curves import Series, collect, short
from .metrics import replace_file
from .panels import AFTER_BALANCE, BEFORE_BALANCE, PANELS, Panel, sections
from .progress import short_time
from .stacks import NAMES

RECENT = 50


@dataclass(frozen=True)
class RunData:
    """All that the page is made from. Anything but `folder` may be empty."""

    folder: Path
    records: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    events: list[dict[str, Any]]

    def key(self, dotted: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted key."""
        value: Any = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def last(self, name: str) -> float | None:
        """The latest logged value of a metric."""
        return next((record[name] for record in reversed(self.records) if record.get(name) is not None), None)


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write the page from what the run directory holds now, and return its path.

    Reads config.yaml, metrics.jsonl, events.jsonl, summary.json, timeline.json and checkpoints/; each may be
    missing, as in a run that has just started. Raises OSError when the page cannot be written.
    """
    run = load(Path(run_dir))
    target = run.folder / "report.html"
    replace_file(target, page(run).encode())
    return target


def load(folder: Path) -> RunData:
    """Read the run directory. A file that cannot be parsed counts as missing: the rest is worth a page."""
    config: Any = None
    summary: Any = None
    if (folder / "config.yaml").exists():
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text())
        except yaml.YAMLError:
            config = None
    if (folder / "summary.json").exists():
        try:
            summary = json.loads((folder / "summary.json").read_text())
        except ValueError:
            summary = None
    return RunData(
        folder,
        metrics.read(folder),
        config if isinstance(config, dict) else {},
        summary if isinstance(summary, dict) else {},
        events.read(folder),
    )


def page(run: RunData) -> str:
    """The whole document."""
    title = escape(str(run.key("run.name", run.folder.name)))
    body = "".join(
        [
            header(run, title),
            tiles(run),
            charts(run),
            needles.section(run.folder),
            pipeline(run),
            held_activations(run),
            event_list(run),
            checkpoint_list(run),
            last_line(run),
        ]
    )
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    footer = f"<footer>Written by k3train report on {written}.</footer>"
    return document(title, f"{body}{config_table(run.config)}{footer}", assets("report"))


def document(title: str, body: str, looks: tuple[str, str]) -> str:
    """A page that needs nothing else; `title` and `body` are HTML, `looks` are of `assets`."""
    style, script = looks
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Without one, a browser asks the server for /favicon.ico.
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title>\n<style>\n{style}</style></head>\n<body><main>{body}</main>\n"
        f"<script>\n{script}</script></body></html>\n"
    )


def assets(*names: str) -> tuple[str, str]:
    """Style and script of the pages `names`, one behind the other."""
    folder = resources.files(__package__) / "assets"
    return tuple("".join((folder / f"{name}.{kind}").read_text() for name in names) for kind in ("css", "js"))  # type: ignore[return-value]


def header(run: RunData, title: str) -> str:
    facts = {
        "Parameters": parameters(run.summary.get("parameters")),
        "Layout": layout(run),
        "Hardware": run.summary.get("hardware"),
        "Commit": str(run.summary.get("git_commit") or "")[:12],
        "Started": when(run.summary.get("started")),
        "Duration": duration(run.summary),
    }
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts.items() if value
    )
    recipe = run.key("recipe")
    kind = f'<p class="kind">Training run, recipe {escape(str(recipe))}</p>' if recipe else ""
    return (
        f'<header>{kind}<h1>{title}</h1><p class="status">{escape(status(run))}</p>'
        + (f'<dl class="facts">{items}</dl>' if items else "")
        + "</header>"
    )


def status(run: RunData) -> str:
    """How far the run got, in one sentence."""
    total = run.key("run.steps")
    if not run.records:
        return "No metrics have been logged yet."
    step = run.records[-1]["step"]
    of = f" of {total:,}" if isinstance(total, int) else ""
    if isinstance(total, int) and step >= total:
        return f"All {total:,} steps done."
    if run.summary.get("finished"):
        return f"Ended after step {step:,}{of}."
    return f"Step {step:,}{of}; no end of the run is recorded, it is running or was stopped."


def parameters(count: Any) -> str | None:
    """A parameter count, or the total and active ones of a mapping with those keys."""
    if isinstance(count, Mapping):
        parts = [f"{short(count[name])} {name}" for name in ("total", "active") if name in count]
        return ", ".join(parts) or None
    return short(count) if isinstance(count, int | float) else None


def layout(run: RunData) -> str | None:
    """Ranks and how they are used, as far as it is more than one in each direction."""
    names = {"pipeline": "PP", "virtual": "VPP", "expert": "EP", "context": "CP", "data": "DP"}
    sizes = {short_name: run.key(f"parallel.{name}") for name, short_name in names.items()}
    parts = [f"{name}{size}" for name, size in sizes.items() if isinstance(size, int) and size > 1]
    ranks = run.summary.get("world_size")
    if isinstance(ranks, int):
        parts.insert(0, f"{ranks:,} rank{'s' if ranks != 1 else ''}")
    return ", ".join(parts) or None


def instant(value: Any) -> datetime | None:
    """A time given as ISO 8601 text or as seconds since 1970."""
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        return datetime.fromisoformat(value).astimezone(UTC) if isinstance(value, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def when(value: Any) -> str | None:
    moment = instant(value)
    return moment.strftime("%Y-%m-%d %H:%M UTC") if moment else None


def duration(summary: Mapping[str, Any]) -> str | None:
    started, finished = instant(summary.get("started")), instant(summary.get("finished"))
    return short_time((finished - started).total_seconds()) if started and finished else None


def tiles(run: RunData) -> str:
    """The numbers that a reader looks for first."""
    shown = [
        tile("Final loss", number(run.last("loss")), smallest(run, "loss")),
        tile("Final validation loss", number(run.last("val_loss")), against_bigram(run)),
    ]
    speed, mfu = recent_median(run, "tokens_per_second"), recent_median(run, "mfu")
    detail = "median of recent steps"
    shown.append(tile("Tokens per second", None if speed is None else short(float(f"{speed:.3g}")), detail))
    shown.append(tile("MFU", None if mfu is None else f"{mfu:.1%}", detail))
    steps = run.records[-1]["step"] if run.records else None
    shown.append(tile("Steps", None if steps is None else f"{steps:,}", tokens_seen(run, steps)))
    present = "".join(entry for entry in shown if entry)
    return f'<section class="tiles" aria-label="Final numbers">{present}</section>' if present else ""


def tile(name: str, value: str | None, detail: str) -> str:
    if value is None:
        return ""
    return (
        f'<div class="tile"><div class="name">{name}</div><div class="value">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
    )


def number(value: Any) -> str | None:
    if not isinstance(value, int | float):
        return None
    return f"{value:.4f}" if math.isfinite(value) and 0.01 <= abs(value) < 1e4 else f"{value:.4g}"


def finite(run: RunData, name: str) -> list[tuple[int, float]]:
    """Steps and values of one metric where it is a finite number."""
    pairs = ((record["step"], record.get(name)) for record in run.records)
    return [(step, value) for step, value in pairs if isinstance(value, int | float) and math.isfinite(value)]


def smallest(run: RunData, name: str) -> str:
    values = finite(run, name)
    if not values:
        return ""
    step, value = min(values, key=lambda pair: pair[1])
    return f"least {number(value)} at step {step:,}"


def against_bigram(run: RunData) -> str:
    """The validation loss beside that of a byte bigram model on the same split."""
    bigram, loss = run.summary.get("bigram_loss"), run.last("val_loss")
    if not isinstance(bigram, int | float) or loss is None:
        return smallest(run, "val_loss")
    gap = bigram - loss
    return f"{abs(gap):.3f} {'below' if gap > 0 else 'above'} bigram {bigram:.4f}"


def recent_median(run: RunData, name: str) -> float | None:
    values = finite(run, name)[-RECENT:]
    return statistics.median(value for _, value in values) if values else None


def tokens_seen(run: RunData, steps: int | None) -> str:
    """Tokens of all steps, where the summary tells how many one step has."""
    tokens = run.summary.get("tokens_per_step")
    return f"{short(tokens * steps)} tokens" if isinstance(tokens, int) and steps else ""


def charts(run: RunData) -> str:
    """A section of panels for each group that has data, and the rest of the metrics at the end."""
    series = collect(run.records)
    if not series:
        return '<h2>Curves</h2><p class="empty">No metrics have been logged yet.</p>'
    steps = (run.records[0]["step"], max(record["step"] for record in run.records))
    marks = borders(run.records)
    shown: list[str] = []
    placed: set[str] = set()
    for section, panels in sections(PANELS).items():
        figures = []
        for panel in panels:
            names = panel.select(series)
            placed.update(names)
            if names:
                figures.append(panel_figure(panel, [series[name] for name in names], steps, marks))
        if section == "Experts":
            figures += heat_figures(series)
        shown.append(section_html(section, figures))
    others = [name for name in series if name not in placed]
    figures = [panel_figure(Panel("Other", name, (name,)), [series[name]], steps, marks) for name in others]
    shown.append(section_html("Other metrics", figures))
    return "".join(shown)


def borders(records: Sequence[Mapping[str, Any]]) -> list[Border]:
    """Where the stages of a run begin: halfway between two steps; the first one too, when there are more."""
    found: list[Border] = []
    for record in records:
        name = record.get("stage")
        if isinstance(name, str) and (not found or found[-1][1] != name):
            found.append((record["step"] - 0.5 if found else record["step"], name))
    return found if len(found) > 1 else []


def section_html(title: str, figures: Sequence[str]) -> str:
    if not figures:
        return ""
    return f'<section><h2>{escape(title)}</h2><div class="panels">{"".join(figures)}</div></section>'


def heat_figures(series: Mapping[str, Series]) -> list[str]:
    """Expert load by layer and step, before and after balancing, in the same colours."""
    kinds = {"Expert load by layer, before": BEFORE_BALANCE, "Expert load by layer, after": AFTER_BALANCE}
    grids = {}
    for title, pattern in kinds.items():
        names = Panel("", "", (pattern,)).select(series)
        lines = [series[name] for name in names if series[name].points]
        if lines:
            grids[title] = heat_map(lines)
    values = sorted(v for grid in grids.values() for row in grid.rows for v in row if v is not None)
    if not values:
        return []
    # A few extreme first steps would leave the rest of the map one colour.
    high = max(float(f"{values[int(0.98 * (len(values) - 1))]:.2g}"), 1.1)
    return [heat_figure(title, grid, 1.0, high) for title, grid in grids.items()]


def pipeline(run: RunData) -> str:
    """A recorded step beside the plan with the run's median costs: idle time by rank, and pictures."""
    try:
        found = timeline.compare(timeline.read(run.folder))
    except (UserError, DeadlockError):  # none, or not whole: the rest is worth a page
        return ""
    both = {"Planned": found.planned, "Measured": found.measured}
    pairs = enumerate(zip(found.planned_idle, found.measured_idle, strict=True))
    rows = [
        (rank, f"{planned:.1%}", f"{measured:.1%}", f"{100 * (measured - planned):+.1f}")
        for rank, (planned, measured) in pairs
    ]
    head = ("Pipeline rank", "Planned idle", "Measured idle", "Points apart")
    pictures = "".join(
        f'<h3>{name}</h3><div class="timeline-wrap">{draw.svg(line, unit="s", inline=True)}</div>'
        for name, line in both.items()
    )
    return (
        f'<section><h2>Pipeline</h2>{table(head, rows)}<p class="status">The plan'
        f" simulates the recorded order with the "
        f"median time of each operation; measured is the median of all recorded steps, and the picture the "
        f"step of median length.</p>{pictures}</section>"
    )


def held_activations(run: RunData) -> str:
    """Where a measured step held its activations, beside the plan of the run's configuration."""
    steps = activations.read(run.folder)
    if not steps:
        return ""
    step, measured = max(steps.items())
    planned, span = planned_activations(run)
    compared = activations.compare(planned, measured)
    rows = [
        (
            NAMES.get(entry.place, entry.place),
            size_text(entry.planned),
            size_text(entry.measured),
            f"{entry.ratio:.3f}" if entry.ratio is not None else "-",
        )
        for entry in compared
    ]
    shown = {"Planned": (dict(enumerate(planned)), span), "Measured": (measured, activations.span(measured))}
    pictures = "".join(
        f'<h3>{name}</h3><div class="timeline-wrap">'
        f"{stacks.svg({f'pipeline rank {rank}': series for rank, series in found.items()}, end, inline=True)}"
        "</div>"
        for name, (found, end) in shown.items()
        if found
    )
    head = ("Place", "Planned, at most", "Measured, at most", "Measured / planned")
    return (
        f'<section><h2>Activations</h2>{table(head, rows)}<p class="status">The most that any pipeline rank '
        f"held behind an operation of step {step:,}; the plan has evenly loaded experts and whole documents."
        f"</p>{pictures}</section>"
    )


def planned_activations(run: RunData) -> tuple[list[stacks.Series], float]:
    """What each pipeline rank was to hold, and the step's length; nothing where it cannot be planned."""
    from ..layout import layout_of
    from ..plan import step_series
    from ..schedule import simulation

    try:
        config = load_yaml(run.folder / "config.yaml")
        ranks = run.summary.get("world_size") or config.cluster.nodes * (config.cluster.ranks_per_node or 1)
        topology = layout_of(config, int(ranks))
        simulated = simulation(config, topology)
        return step_series(config, topology, simulated), float(simulated.timeline.makespan)
    except (UserError, ValueError, DeadlockError):
        return [], 0.0


def event_list(run: RunData) -> str:
    """Recorded events and steps whose loss was not finite, by step."""
    found = [(e.get("step"), when(e.get("time")), e.get("kind"), e.get("text")) for e in run.events]
    told = run.summary.get("events")
    for event in told if isinstance(told, list) else []:
        if isinstance(event, Mapping):
            found.append((event.get("step"), when(event.get("time")), event.get("kind"), event.get("text")))
        else:
            found.append((None, None, None, event))
    for record in run.records:
        loss = record.get("loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            found.append((record["step"], None, "not finite", f"loss {metrics.plain(loss)}"))
    if not found:
        return ""
    rows = [
        (f"{step:,}" if isinstance(step, int) else "", at or "", kind or "", text or "")
        for step, at, kind, text in sorted(found, key=lambda event: event[0] or 0)
    ]
    return f"<h2>Events</h2>{table(('Step', 'Time', 'Kind', 'What happened'), rows)}"


def checkpoint_list(run: RunData) -> str:
    folder = run.folder / "checkpoints"
    found = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not found:
        return ""
    rows = [(path.name, size_text(folder_bytes(path)), when(path.stat().st_mtime) or "") for path in found]
    return f"<h2>Checkpoints</h2>{table(('Name', 'Size', 'Written'), rows)}"


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below; files that vanish meanwhile, as in a running run, count as none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def size_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def last_line(run: RunData) -> str:
    """Every value of the last logged step, in full precision."""
    if not run.records:
        return ""
    record = run.records[-1]
    rows = [(name, repr(value) if isinstance(value, float) else str(value)) for name, value in record.items()]
    return f"<details><summary>Last logged step</summary>{table(('Metric', 'Value'), rows)}</details>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def config_table(config: Mapping[str, Any]) -> str:
    """The configuration by section, folded away."""
    if not config:
        return ""
    plain = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    groups = {"": plain} | {key: leaves(value) for key, value in config.items() if isinstance(value, Mapping)}
    tables = []
    for name, entries in groups.items():
        rows = "".join(
            f"<tr><td>{escape(str(key))}</td>"
            f"<td><code>{escape('' if value is None else str(value))}</code></td></tr>"
            for key, value in entries.items()
        )
        head = f'<thead><tr><th colspan="2">{escape(str(name))}</th></tr></thead>' if name else ""
        if rows:
            tables.append(f"<table>{head}<tbody>{rows}</tbody></table>")
    return f'<details><summary>Configuration</summary><div class="columns">{"".join(tables)}</div></details>'


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key and value of every leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(leaves(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat

"""The panels as a Grafana dashboard over what `prometheus` serves; `launch.reference` writes the file."""

from __future__ import annotations

import json
from typing import Any

from .panels import Panel, sections
from .prometheus import PREFIX, sample_of

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUN = 'run=~"$run"'
# The dashboard's names of units; the format has bytes where the panel has GiB.
UNITS = {"GiB": "bytes", "bytes": "bytes", "milliseconds": "ms", "seconds per step": "s"}
ACROSS, HEIGHT, WIDTH = 2, 8, 12
"""Panels in a row; rows and columns of the dashboard's grid that one takes."""
PER_LINE = {"phase": "{{phase}}", "kind": "{{kind}} of rank {{rank}}", "layer": "layer {{layer}}"}


def dashboard_text() -> str:
    """The file, as it is imported into Grafana."""
    return json.dumps(dashboard(), indent=1) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard: the state of the runs, then the sections of `panels`."""
    shown: list[dict[str, Any]] = []
    place_section(shown, "State", state())
    for name, panels in sections().items():
        place_section(shown, name, [chart(panel) for panel in panels])
    for number, panel in enumerate(shown, 1):
        panel["id"] = number
    return {
        "title": "k3train",
        "uid": "k3train",
        "schemaVersion": 39,
        "tags": ["k3train"],
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables()},
        "panels": shown,
    }


def variables() -> list[dict[str, Any]]:
    """What is chosen at the top: the data source, and the runs."""
    query = f"label_values({PREFIX}step, run)"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "run"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def place_section(shown: list[dict[str, Any]], title: str, panels: list[dict[str, Any]]) -> None:
    """Append a heading and its panels below what is there."""
    top = max((panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown), default=0)
    heading = {"x": 0, "y": top, "w": ACROSS * WIDTH, "h": 1}
    shown.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": heading})
    for index, panel in enumerate(panels):
        row, column = divmod(index, ACROSS)
        spot = {"x": column * WIDTH, "y": top + 1 + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
        shown.append(panel | {"gridPos": spot})


def state() -> list[dict[str, Any]]:
    """Families that are no metric of a step."""
    first = f'{RUN},rank="0"'
    return [
        series("Alerts that are on", [(f"{PREFIX}alert{{{RUN}}}", "{{run}}: {{alert}}")]),
        series("Step", [(f"{PREFIX}step{{{first}}}", "{{run}}")]),
        series(
            "Since the last line",
            [(f"time() - {PREFIX}last_step_timestamp_seconds{{{RUN}}}", "{{run}}, rank {{rank}}")],
            unit="s",
        ),
        series(
            "Age of the newest checkpoint",
            [(f"{PREFIX}checkpoint_age_seconds{{{RUN}}}", "{{run}}")],
            unit="s",
        ),
        series("Free space", [(f"{PREFIX}disk_free_bytes{{{RUN}}}", "{{run}}")], unit="bytes"),
    ]


def chart(panel: Panel) -> dict[str, Any]:
    """One panel: a query for each of its metrics. Only memory and phases are of every node."""
    queries = []
    families = {sample_of(pattern).family: pattern for pattern in reversed(panel.metrics)}
    for family, pattern in reversed(families.items()):
        # The layers' query has the MTP layer too.
        labels = sample_of(pattern).labels
        fixed = [f'{name}="{value}"' for name, value in labels.items() if value != "*"]
        local = family in (f"{PREFIX}memory_bytes", f"{PREFIX}phase_seconds")
        chosen = ",".join([RUN, *([] if local else ['rank="0"']), *fixed])
        starred = [PER_LINE[name] for name, value in labels.items() if value == "*"]
        what = starred or ([family.removeprefix(PREFIX)] if len(families) > 1 else [])
        queries.append((f"{family}{{{chosen}}}", ", ".join(["{{run}}", *what])))
    return series(
        panel.title, queries, unit=UNITS.get(panel.unit, ""), log=panel.scale == "log", note=panel.unit
    )


def series(
    title: str, queries: list[tuple[str, str]], *, unit: str = "", log: bool = False, note: str = ""
) -> dict[str, Any]:
    """A chart over time of `queries`, each with the name of its lines."""
    scale: dict[str, Any] = {"type": "log", "log": 10} if log else {"type": "linear"}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for index, (query, legend) in enumerate(queries)
    ]
    return {
        "type": "timeseries",
        "title": title,
        "description": "" if unit else note,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {
            "defaults": {"unit": unit or "short", "custom": {"scaleDistribution": scale, "spanNulls": True}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }

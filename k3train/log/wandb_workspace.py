"""The panels as a workspace of wandb; `python -m launch.workspace PROJECT` saves it there.

What stands in it is plain data, made without wandb. Only `build` needs the package `wandb-workspaces`.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import UserError
from .panels import Panel, as_regex, sections

NAME = "k3train"
STEP = "Step"
"""wandb's own axis: the step that a record was logged with."""
SMOOTHING = 0.6
OPEN = ("Loss", "Optimizer", "Throughput")
"""Sections that are unfolded when the workspace is opened."""
ACROSS, ROWS = 3, 2
"""Panels in a row of a section, and rows on a page of it."""


def workspace() -> list[dict[str, Any]]:
    """The sections: `name`, `is_open`, and `panels` as keywords of a line plot."""
    return [
        {"name": name, "is_open": name in OPEN, "panels": [line_plot(panel) for panel in panels]}
        for name, panels in sections().items()
    ]


def line_plot(panel: Panel) -> dict[str, Any]:
    """One panel: its metrics by name, or by one regular expression where a layer, phase or kind is open."""
    names: dict[str, Any] = {"y": list(panel.metrics)}
    if any("*" in pattern for pattern in panel.metrics):
        names = {"metric_regex": f"^({'|'.join(map(as_regex, panel.metrics))})$"}
    plot = {"title": panel.title, "x": STEP, "title_y": panel.unit, "log_y": panel.scale == "log", **names}
    if panel.smooth:
        plot |= {
            "smoothing_type": "exponentialTimeWeighted",
            "smoothing_factor": SMOOTHING,
            "smoothing_show_original": True,
        }
    return plot


def build(project: str, entity: str) -> Any:
    """A `wandb_workspaces.workspaces.Workspace`, not saved yet. Raises UserError without the package."""
    try:
        made = importlib.import_module("wandb_workspaces.workspaces")
        plots = importlib.import_module("wandb_workspaces.reports.v2")
    except ImportError as error:
        raise UserError(
            f"wandb workspace: needs a package ({error}); install it with `pip install wandb-workspaces`"
        ) from error
    layout = made.SectionLayoutSettings(columns=ACROSS, rows=ROWS)
    found = [
        made.Section(
            name=section["name"],
            is_open=section["is_open"],
            panels=[plots.LinePlot(**plot) for plot in section["panels"]],
            layout_settings=layout,
        )
        for section in workspace()
    ]
    return made.Workspace(name=NAME, entity=entity, project=project, sections=found)

"""The panels in wandb: from the same source as TensorBoard's and Grafana's, with and without the package."""

from __future__ import annotations

import json
import re
import sys
import types

import pytest
from tensorboard.plugins.custom_scalar import layout_pb2

from k3train.errors import UserError
from k3train.log import grafana, tensorboard
from k3train.log.panels import PANELS, sections
from k3train.log.wandb_workspace import NAME, build, workspace
from launch.workspace import main


def plots() -> dict[str, dict]:
    return {plot["title"]: plot for section in workspace() for plot in section["panels"]}


def test_three_renderings_show_the_same_panels_in_the_same_sections() -> None:
    expected = {name: [panel.title for panel in panels] for name, panels in sections().items()}
    wandb = {section["name"]: [plot["title"] for plot in section["panels"]] for section in workspace()}
    layout = layout_pb2.Layout.FromString(tensorboard.layout_summary().value[0].tensor.string_val[0])
    board = {each.title: [chart.title for chart in each.chart] for each in layout.category}
    titles = [(panel["type"], panel["title"]) for panel in grafana.dashboard()["panels"]]
    shown: dict[str, list[str]] = {}
    for kind, title in titles:
        if kind == "row":
            heading = shown.setdefault(title, [])
        else:
            heading.append(title)
    assert shown.pop("State")
    assert wandb == board == shown == expected


def test_a_plot_has_the_metrics_of_its_panel_and_no_others() -> None:
    names = [pattern.replace("*", "12") for panel in PANELS for pattern in panel.metrics]
    for panel in PANELS:
        plot = plots()[panel.title]
        regex = plot.get("metric_regex")
        found = [name for name in names if re.search(regex, name)] if regex else plot["y"]
        assert sorted(found) == sorted(panel.select(names)), panel.title
        assert ("y" in plot) != ("metric_regex" in plot)


def test_axes_units_and_smoothing() -> None:
    norm, memory = plots()["Gradient norm"], plots()["Memory"]
    assert (norm["log_y"], norm["smoothing_factor"], norm["x"]) == (True, 0.6, "Step")
    assert (memory["log_y"], memory["title_y"]) == (False, "GiB")
    assert "smoothing_factor" not in memory


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match="pip install wandb-workspaces"):
        build("project", "me")
    assert main(["me/project"]) == 2
    error = capsys.readouterr().err
    assert "wandb-workspaces" in error and error.count("\n") == 1


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[types.SimpleNamespace]:
    """A stand-in for the package that keeps what is saved, or fails as one without a login."""
    saved: list[types.SimpleNamespace] = []

    class Workspace(types.SimpleNamespace):
        url = "https://wandb.example/me/project?nw=1"

        def save(self) -> None:
            if self.entity == "nobody":
                raise RuntimeError("api_key not configured\nTraceback")
            saved.append(self)

    of = types.SimpleNamespace
    made = of(Workspace=Workspace, Section=of, SectionLayoutSettings=of)
    modules = {"": of(), ".workspaces": made, ".reports": of(), ".reports.v2": of(LinePlot=of)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"wandb_workspaces{name}", module)
    return saved


def test_it_is_saved_in_its_project(package: list[types.SimpleNamespace], capsys) -> None:
    assert main(["me/project"]) == 0
    assert capsys.readouterr().out == "https://wandb.example/me/project?nw=1\n"
    (saved,) = package
    assert (saved.name, saved.entity, saved.project) == (NAME, "me", "project")
    assert sum(len(section.panels) for section in saved.sections) == len(PANELS)
    assert next(section.name for section in saved.sections if section.is_open) == "Loss"


def test_a_failure_is_one_line(package: list[types.SimpleNamespace], capsys) -> None:
    assert main(["nobody/project"]) == 2
    error = capsys.readouterr().err
    assert error == "k3train: nobody/project: not saved (api_key not configured); see `wandb login`\n"
    assert not package


@pytest.mark.parametrize("given", [[], ["project"], ["/project"], ["me/"], ["a/b/c"], ["a/b", "c/d"]])
def test_what_is_no_project_is_refused(given: list[str], capsys) -> None:
    assert main(given) == 2
    assert "takes ENTITY/PROJECT" in capsys.readouterr().err


def test_plain_data_needs_no_package(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == workspace()


def test_the_package_itself_takes_it() -> None:
    pytest.importorskip("wandb_workspaces")
    spec = json.loads(build("project", "me")._to_model().model_dump_json(by_alias=True))["spec"]
    found = spec["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in found] == list(sections())
    configs = {each["config"]["chartTitle"]: each["config"] for part in found for each in part["panels"]}
    assert configs["Loss"]["metrics"] == ["loss", "mtp_loss", "val_loss"]
    assert configs["Memory"]["metricRegex"] == "^(memory/[^/]*)$" and configs["Memory"]["useMetricRegex"]
    assert configs["Gradient norm"]["yLogScale"] and configs["Loss"]["xAxis"] == "_step"

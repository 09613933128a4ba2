"""Measured bytes beside planned ones, and their picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from k3train.config_file import to_yaml
from k3train.layout import layout_of
from k3train.log import activations, stacks
from k3train.log.report import write_report
from k3train.log.stacks import Series
from k3train.plan import step_series
from k3train.schedule import simulation
from launch.compose import ready


def write(folder: Path, lines: list[object]) -> None:
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / activations.FILE_NAME).write_text(text + '\n{"step": 3, "ra')


def entry(step: int, rank: int, seconds: float, **held: int) -> dict[str, object]:
    return {"step": step, "rank": rank, "op": "F(0,0)", "seconds": seconds, "bytes": held}


def test_lines_become_series_by_step_and_rank(tmp_path: Path) -> None:
    assert activations.read(tmp_path) == {}
    lines = [entry(2, 1, 101.0, device=5), entry(2, 0, 100.0, device=3), entry(2, 0, 102.0, device=0, host=7)]
    write(tmp_path, [*lines, {"step": 2}, "x", entry(4, 0, 9.0, device=1)])
    found = activations.read(tmp_path)
    assert list(found) == [2, 4] and list(found[2]) == [0, 1]
    assert found[2][0] == Series([0.0, 2.0], {"device": [3.0, 0.0], "host": [0.0, 7.0]})
    assert found[2][1].times == [1.0] and activations.span(found[2]) == 2.0


def test_peaks_are_compared_by_place_and_on_the_device_together() -> None:
    planned = [Series([0, 1], {"device": [4, 1], "window": [0, 4], "host": [8, 8]})]
    measured = {0: Series([0, 1], {"device": [4, 2], "window": [0, 4], "host": [9, 0]})}
    found = {each.place: (each.planned, each.measured) for each in activations.compare(planned, measured)}
    assert found == {"device": (4, 4), "window": (4, 4), "host": (8, 9), activations.TOGETHER: (5, 6)}
    ratios = {each.place: each.ratio for each in activations.compare(planned, measured)}
    assert ratios["host"] == 9 / 8 and ratios[activations.TOGETHER] == 6 / 5
    assert activations.compare([], measured)[0].ratio is None


@pytest.mark.parametrize("inline", [False, True])
def test_the_picture_stacks_what_stands_until_the_next_moment(inline: bool) -> None:
    rows = {"rank 0": Series([0.0, 0.5], {"device": [2**20, 0], "host": [0, 2 * 2**20]})}
    text = stacks.svg(rows, 1.0, inline=inline)
    root = ElementTree.fromstring(text)
    paths = [element for element in root.iter() if element.tag.endswith("path")]
    assert [path[0].text for path in paths] == ["device, as saved: at most 1.00", "host memory: at most 2.00"]
    middle = stacks.LEFT + stacks.WIDTH // 2
    top = stacks.TOP + stacks.ROW
    # The device's area is half as high as the row, and ends in its middle; the host's fills the rest.
    first, second = (path.attrib["d"] for path in paths)
    assert f"M{stacks.LEFT} {top - stacks.ROW / 2:.1f}" in first and f"L{middle} {top:.1f}" in first
    assert f"L{middle} {stacks.TOP:.1f}" in second and "MiB" in text
    assert ("xmlns" in text) != inline
    assert stacks.svg({"rank 0": Series([], {})}, 0.0).startswith("<svg")


def test_many_moments_take_a_column_each_and_show_their_highest() -> None:
    times = [float(number) for number in range(50_000)]
    spike = [5 * 2**20 if number == 25_001 else 2**20 for number in range(50_000)]
    text = stacks.svg({"rank 0": Series(times, {"device": spike})}, 50_000.0)
    assert "at most 5.00" in text and len(text) < 8000
    assert f"{stacks.TOP:.1f}" in text


def test_the_report_draws_measured_beside_planned(tmp_path: Path) -> None:
    overrides = ["recipe=tiny", "vision=none", "data.images=[]", "offload.policy=host"]
    config = ready(overrides, inputs=False)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    topology = layout_of(config, 2)
    planned = step_series(config, topology, simulation(config, topology))
    most = max(series.peak("host") for series in planned)
    write(tmp_path, [entry(2, 0, 1.0, device=10, host=int(most)), entry(2, 0, 2.0, device=0, host=0)])
    page = write_report(tmp_path).read_text()
    assert "<h2>Activations</h2>" in page and "host memory" in page
    assert "<td>1.000</td>" in page and page.count('class="stack"') == 2
    (tmp_path / "config.yaml").write_text("run: [")
    page = write_report(tmp_path).read_text()
    assert page.count('class="stack"') == 1 and "<td>-</td>" in page

import base64
import json
import math
import re
import struct
import zlib
from html.parser import HTMLParser

import pytest
import yaml

from k3train.log import events
from k3train.log.charts import alpha_png, heat_map, panel_figure
from k3train.log.curves import Series
from k3train.log.metrics import MetricsLog
from k3train.log.panels import PANELS
from k3train.log.report import borders, write_report

VOID = {"meta", "img", "line", "path", "br", "link"}


class Page(HTMLParser):
    """Checks nesting and gathers what tests look at."""

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.headings, self.scripts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data.strip())
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def fill(folder, steps, extra=None):
    log = MetricsLog(folder, resume_step=0)
    for step in range(1, steps + 1):
        values = {"loss": 5 / step + 1 / 3, "grad_norm": 1.0 + 1 / step, "tokens_per_second": 1000.0 + step}
        for layer in (2, 10):
            values[f"moe/expert_load_max_over_mean/layer_{layer}"] = 1 + layer / step
            values[f"moe/unbiased_load_max_over_mean/layer_{layer}"] = 2 + layer / step
        log.write(step, values | (extra(step) if extra else {}))
    log.close()


def report(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text()
    return text, Page(text)


def test_the_page_holds_the_last_line_in_full(tmp_path):
    fill(tmp_path, 30, lambda step: {"val_loss": 1 / 7, "custom": step / 9})
    text, page = report(tmp_path)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    for name, value in last.items():
        assert f"<td>{name}</td><td>{value!r}</td>" in text
    assert f'<div class="value">{last["loss"]:.4f}</div>' in text
    assert {"Loss", "Gradient norm", "Expert load by layer, after", "custom"} <= set(page.headings)


def test_the_page_asks_for_nothing_from_outside(tmp_path):
    fill(tmp_path, 5)
    text, page = report(tmp_path)
    assert page.references
    assert all(reference.startswith("data:") for reference in page.references)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", text)


def test_header_tiles_and_configuration(tmp_path):
    fill(tmp_path, 10, lambda step: {"val_loss": 2.0, "mfu": 0.25})
    config = {
        "recipe": "tiny",
        "run": {"name": "a <b>", "steps": 20},
        "parallel": {"pipeline": 2, "expert": 1},
        "model": {"backends": {"kda": "torch_chunk"}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {
        "parameters": {"total": 12_300_000, "active": 4_000_000},
        "bigram_loss": 2.5,
        "world_size": 4,
        "hardware": "2-core CPU",
        "git_commit": "0123456789abcdef",
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T01:02:00+00:00",
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    text, page = report(tmp_path)
    assert "a &lt;b&gt;" in text
    assert page.headings[0] == "a <b>"
    for shown in (
        "recipe tiny",
        "Ended after step 10 of 20",
        "12.3M total, 4M active",
        "4 ranks, PP2",
        "2-core CPU",
        "0123456789ab<",
        "1h02m",
        "0.500 below bigram 2.5000",
        "25.0%",
        "<td>backends.kda</td><td><code>torch_chunk</code></td>",
    ):
        assert shown in text


def test_a_run_without_metrics_says_so(tmp_path):
    text, page = report(tmp_path)
    assert "No metrics have been logged yet." in text
    assert page.headings[0] == tmp_path.name


def test_files_that_cannot_be_parsed_count_as_missing(tmp_path):
    fill(tmp_path, 2)
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "summary.json").write_text("{")
    text, _ = report(tmp_path)
    assert "Step 2; no end of the run is recorded" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_told_and_not_drawn(tmp_path, value):
    fill(tmp_path, 6, lambda step: {"loss": value} if step == 6 else {})
    text, _ = report(tmp_path)
    assert "1 value of loss not finite, not drawn" in text
    assert "not finite</td><td>loss" in text
    drawn = re.findall(r' d="([^"]*)"', text)
    assert drawn
    assert not any("nan" in path or "inf" in path for path in drawn)
    for script in Page(text).scripts[:-1]:
        json.loads(script, parse_constant=lambda constant: pytest.fail(constant))


def test_only_values_that_are_not_finite(tmp_path):
    fill(tmp_path, 3, lambda step: {"loss": math.nan})
    text, _ = report(tmp_path)
    assert "3 values of loss not finite" in text


def test_a_long_run_is_reduced(tmp_path):
    fill(tmp_path, 6000)
    text, _ = report(tmp_path)
    longest = max(
        len(json.loads(script)["series"][0]["points"])
        for script in Page(text).scripts
        if "series" in script[:200]
    )
    assert 1000 < longest <= 2000
    assert max(path.count("L") for path in re.findall(r' d="([^"]*)"', text)) < 2000


def test_events_and_checkpoints_are_listed(tmp_path):
    fill(tmp_path, 3)
    events.append(tmp_path, 2, "resumed", "from <step 2>")
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_2" / "a.bin").write_bytes(b"0" * 2048)
    (tmp_path / "summary.json").write_text(json.dumps({"events": ["a plain sentence"]}))
    text, _ = report(tmp_path)
    assert "<td>resumed</td><td>from &lt;step 2&gt;</td>" in text
    assert "<td>step_2</td><td>2 KiB</td>" in text
    assert "a plain sentence" in text


def test_a_recorded_timeline_is_drawn_beside_its_plan(tmp_path):
    fill(tmp_path, 3)
    ranks = [
        [["F", 0, 0, 0.0, 1.0], ["F", 0, 1, 1.0, 2.0], ["B", 0, 0, 5.0, 7.0], ["B", 0, 1, 8.0, 10.0]],
        [["F", 0, 0, 1.0, 2.0], ["B", 0, 0, 2.0, 4.0], ["F", 0, 1, 4.0, 5.0], ["B", 0, 1, 5.0, 7.0]],
    ]
    content = {"schema": 1, "pipeline": 2, "virtual": 1, "microbatches": 2}
    content["steps"] = [{"step": 3, "ranks": ranks}]
    (tmp_path / "timeline.json").write_text(json.dumps(content))
    text, page = report(tmp_path)
    # Rank 0 could end after 9 of the 10 seconds that it took; both work for 6.
    assert "<td>0</td><td>33.3%</td><td>40.0%</td><td>+6.7</td>" in text
    assert {"Pipeline", "Planned", "Measured"} <= set(page.headings)
    assert text.count('class="timeline"') == 2
    assert not re.search(r"https?://|@import|url\(", text)
    (tmp_path / "timeline.json").write_text("{}")
    assert "Pipeline" not in report(tmp_path)[1].headings


def test_a_panel_with_a_value_that_is_not_positive_has_no_log_scale():
    panel = PANELS[0]
    both = panel_figure(panel, [Series("loss", [(1, 1.0), (2, 0.5)])], (1, 2))
    linear = panel_figure(panel, [Series("loss", [(1, 1.0), (2, 0.0)])], (1, 2))
    assert ('class="layer log"' in both, 'class="layer log"' in linear) == (True, False)


def test_a_line_is_drawn_where_its_values_are():
    text = panel_figure(PANELS[1], [Series("lr", [(1, 0.0), (3, 10.0)])], (1, 5))
    # The axis runs from 0 to 10.5, the steps from 1 to 5.
    assert ' d="M0.0 1000.0L500.0 47.6"' in text


def test_the_heat_map_keeps_the_worst_of_each_span():
    first = Series("moe/x/layer_1", [(step, float(step)) for step in range(1, 11)])
    second = Series("moe/x/layer_2", [(1, 9.0), (6, 3.0)])
    grid = heat_map([first, second], max_columns=5)
    assert grid.rows == [[2.0, 4.0, 6.0, 8.0, 10.0], [9.0, None, 3.0, None, None]]
    assert (grid.steps, grid.names) == ([1, 3, 5, 7, 9], ["layer 1", "layer 2"])


def test_the_heat_image_is_a_png_whose_opacity_is_the_value():
    content = alpha_png([[1.0, 2.0, 3.0], [None, 5.0, 1.5]], 1.0, 3.0)
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (3, 2)
    start = content.index(b"IDAT")
    (length,) = struct.unpack(">I", content[start - 4 : start])
    pixels = zlib.decompress(content[start + 4 : start + 4 + length])
    rows = [pixels[1:13], pixels[14:26]]
    assert [list(row[3::4]) for row in rows] == [[10, 133, 255], [0, 255, 71]]
    assert base64.b64encode(content)


def test_stages_are_marked_where_they_begin(tmp_path):
    log = MetricsLog(tmp_path, resume_step=0)
    for step in range(1, 11):
        log.write(step, {"loss": 1.0 / step, "stage": "short <8k>" if step <= 4 else "long"})
    log.close()
    page = write_report(tmp_path).read_text()
    Page(page)
    marks = re.findall(r'<span class="border" style="left:([\d.]+)%">([^<]*)</span>', page)
    # Of the axis from step 1 to step 10.
    assert marks == [("0.00", "short &lt;8k&gt;"), ("38.89", "long")]
    assert borders([{"step": 1, "loss": 2.0}]) == borders([{"step": 1, "stage": "one"}]) == []

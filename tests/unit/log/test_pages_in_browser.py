"""The HTML pages as a browser shows them; skipped where there is no Chromium."""

import math

import pytest
import yaml

from k3train.log import events
from k3train.log.compare import write_comparison
from k3train.log.metrics import MetricsLog
from k3train.log.report import write_report
from tests import browser

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium here (CHROME_BIN names one)")

DRAWN = """[...document.querySelectorAll('figure.panel .layer')].filter(
  (layer) => getComputedStyle(layer).display !== 'none').map((layer) => {
    const path = layer.querySelector('.lines path'), box = path.getBoundingClientRect();
    return [getComputedStyle(path).stroke, box.width, box.height]; })"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    started = browser.Browser(browser.find(), tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def fill(folder, name, slope, steps=150):
    log = MetricsLog(folder, resume_step=0)
    for step in range(1, steps + 1):
        values = {"loss": 5 - slope * math.log(step), "grad_norm": 1 + 1 / step, "lr": 1e-3}
        values |= {
            "tokens_per_second": 1000.0 * slope,
            "mfu": 0.3,
            "some/metric_of_its_own_without_a_panel_and_with_a_long_name": 1.0,
            "time/step": 0.5,
            "time/optimizer": 0.1,
        }
        values |= {f"moe/expert_load_max_over_mean/layer_{n}": 1 + n / step for n in range(12)}
        values |= {f"moe/unbiased_load_max_over_mean/layer_{n}": 2 + n / step for n in range(12)}
        log.write(step, values)
    log.close()
    config = {"run": {"name": name, "steps": steps}, "optim": {"lr": slope, "name": "muon_per_head"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    events.append(folder, 3, "alert", "stall: " + "a_long_word_without_a_break_" * 8)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, slope in (("one", 0.5), ("two", 0.25)):
        (root / name).mkdir()
        fill(root / name, f"run_{name}", slope)
    return {
        "report": write_report(root / "one"),
        "comparison": write_comparison([root / "one", root / "two"], root / "comparison.html"),
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_the_page_is_drawn_without_an_error(chromium, pages, name, width, dark):
    chromium.open(pages[name], width=width, dark=dark)
    drawn = chromium.value(DRAWN)
    assert len(drawn) >= 8
    assert all(across > 50 for _, across, _ in drawn)
    # The first line of a page, and what is written on it, stand out from the page in both schemes.
    page, ink = (
        chromium.value(f"getComputedStyle(document.body).{what}.match(/\\d+/g).slice(0, 3).map(Number)")
        for what in ("backgroundColor", "color")
    )
    assert (sum(page) < 150) == dark
    assert abs(sum(page) - sum(ink)) > 500
    assert drawn[0][0] == ("rgb(127, 176, 242)" if dark else "rgb(36, 83, 156)")
    assert chromium.value("document.documentElement.scrollWidth") <= width
    assert chromium.problems == []
    assert [url for url in chromium.requests if not url.startswith(("file:", "data:"))] == []


def test_the_scale_switch_and_the_read_out(chromium, pages):
    chromium.open(pages["report"], width=1280, dark=False)
    figure = "figure[data-scale]"
    chromium.click(f"{figure} button.scale[data-to=log]")
    assert chromium.value(f"document.querySelector('{figure}').dataset.scale") == "log"
    assert (
        chromium.value(f"getComputedStyle(document.querySelector('{figure} .layer.log')).display") == "block"
    )
    chromium.point_at(f"{figure} .plot", across=1 / 149)
    told = chromium.value(f"document.querySelector('{figure} .readout').innerText")
    # The second of 150 steps, from 1 to 150.
    assert told.splitlines()[0] == "step 2"
    assert f"{5 - 0.5 * math.log(2):.5f}" in told
    assert chromium.problems == []


def test_a_run_can_be_hidden_in_all_charts(chromium, pages):
    chromium.open(pages["comparison"], width=1280, dark=False)
    shown = (
        "[...document.querySelectorAll('figure [data-run=\"1\"]')]"
        ".filter((part) => getComputedStyle(part).display != 'none').length"
    )
    before = chromium.value(shown)
    assert before > 10
    chromium.click("button.run[data-run='1']")
    assert chromium.value(shown) == 0
    chromium.point_at("figure[data-scale] .plot")
    told = chromium.value("document.querySelector('figure[data-scale] .readout').innerText")
    assert "run_one" in told
    assert "run_two" not in told
    chromium.click("button.run[data-run='1']")
    assert chromium.value(shown) == before
    chromium.point_at("figure[data-scale] .plot")
    told = chromium.value("document.querySelector('figure[data-scale] .readout').innerText")
    assert "run_one" in told
    assert "run_two" in told
    assert chromium.problems == []

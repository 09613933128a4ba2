import http.client
import json
import math
import re
from pathlib import Path

import pytest

from k3train.config import Config
from k3train.log import metrics
from k3train.log.grafana import dashboard, dashboard_text
from k3train.log.panels import PANELS
from k3train.log.prometheus import PREFIX, Exporter, render, sample_of
from k3train.log.tracker import Tracker

ROOT = Path(__file__).parents[3]
LINE = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\} (\S+)')


def get(port, path="/metrics"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def parse(text):
    """{(family, label text): value}; each family has its HELP and TYPE before its samples, once."""
    found, declared = {}, []
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert lines[index + 1] == f"# TYPE {family} gauge"
            declared.append(family)
        elif not line.startswith("#"):
            family, labels, value = LINE.fullmatch(line).groups()
            assert family == declared[-1]
            assert (family, labels) not in found
            found[family, labels] = float(value)
    assert len(declared) == len(set(declared))
    assert text.endswith("\n")
    return found


def page(values, run="tiny", **options):
    defaults = {"labels": {"run": run, "rank": "0"}, "at": 5.0, "status": {}, "alerts": {}}
    return render(3, values, **(defaults | options))


def test_metrics_become_families_with_labels_and_base_units():
    values = {"loss": 2.5, "time/step": 0.25, "memory/peak_gib": 2.0, "moe/bias_range/layer_3": 0.5}
    values |= {"moe/bias_range/mtp": 0.75, "stage": "long", "moonep/plan_ms": 1.5, "flag": True}
    own = 'run="tiny",rank="0"'
    assert parse(page(values)) == {
        ("k3train_step", own): 3.0,
        ("k3train_last_step_timestamp_seconds", own): 5.0,
        ("k3train_loss", own): 2.5,
        ("k3train_phase_seconds", f'{own},phase="step"'): 0.25,
        ("k3train_memory_bytes", f'{own},kind="peak"'): 2.0 * 2**30,
        ("k3train_moe_bias_range", f'{own},layer="3"'): 0.5,
        ("k3train_moe_bias_range", f'{own},layer="mtp"'): 0.75,
        ("k3train_moonep_plan_ms", own): 1.5,
    }


def test_values_that_are_not_finite_and_labels_with_any_character():
    text = page({"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf}, run='a"b\\c\nd')
    found = {family: value for (family, _), value in parse(text).items()}
    assert math.isnan(found["k3train_loss"])
    assert (found["k3train_grad_norm"], found["k3train_lr"]) == (math.inf, -math.inf)
    assert 'run="a\\"b\\\\c\\nd"' in text
    assert "k3train_grad_norm{" in text
    assert text.count(" +Inf\n") == 1


def test_a_scrape_gets_the_newest_step_and_what_is_not_in_every_line():
    exporter = Exporter("127.0.0.1", 0, {"run": "tiny"}, lambda: ({"disk_free_bytes": 7.0}, {"stall": True}))
    try:
        assert get(exporter.port)[1] == ""
        exporter.log(1, {"loss": 2.0, "val_loss": 2.5})
        exporter.log(2, {"loss": 1.5})
        answer, text = get(exporter.port)
        assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
        found = {family: value for (family, _), value in parse(text).items()}
        shown = ("step", "loss", "val_loss", "disk_free_bytes", "alert")
        assert [found[PREFIX + name] for name in shown] == [2.0, 1.5, 2.5, 7.0, 1.0]
        assert get(exporter.port, "/")[0].status == 404
        assert get(exporter.port, "/../../etc/passwd")[0].status == 404
    finally:
        exporter.close()


def test_a_port_is_free_again_behind_close_and_refused_while_taken():
    first = Exporter("127.0.0.1", 0, {})
    with pytest.raises(
        RuntimeError, match=r"taken, perhaps by another run on this node.*log\.prometheus_port"
    ):
        Exporter("127.0.0.1", first.port, {})
    first.close()
    again = Exporter("127.0.0.1", first.port, {})
    again.close()


def test_a_taken_port_costs_a_warning_and_training_goes_on(tmp_path):
    other = Exporter("127.0.0.1", 0, {})
    config = Config()
    config.log.tensorboard = False
    config.log.prometheus_port = other.port
    warnings = []
    tracker = Tracker(config, tmp_path, warn=warnings.append)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    other.close()
    assert len(warnings) == 1
    assert warnings[0].startswith("prometheus is off for the rest of this run: port ")
    assert metrics.read(tmp_path) == [{"step": 1, "loss": 1.0}]


@pytest.mark.parametrize(("local_rank", "serves"), [("0", True), ("1", False)])
def test_the_first_rank_of_another_node_serves_and_writes_nothing(tmp_path, monkeypatch, local_rank, serves):
    free = Exporter("127.0.0.1", 0, {})
    free.close()
    config = Config()
    config.log.prometheus_port = free.port
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("RANK", "9")
    tracker = Tracker(config, tmp_path / "run", writer=False)
    try:
        tracker.log(4, {"loss": 1.0, "memory/peak_gib": 1.0})
        if serves:
            found = parse(get(free.port)[1])
            assert found["k3train_memory_bytes", f'run="{config.run.name}",rank="9",kind="peak"'] == 2.0**30
        else:
            with pytest.raises(ConnectionRefusedError):
                get(free.port)
    finally:
        tracker.close()
    assert not (tmp_path / "run").exists()


def queries(tree):
    return [target["expr"] for panel in tree["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_in_the_documentation_is_that_of_the_code():
    text = (ROOT / "docs/grafana/k3train.json").read_text()
    assert text == dashboard_text()
    assert json.loads(text) == dashboard()


def test_every_query_names_a_family_that_is_served():
    names = [pattern.replace("*", "3") for panel in PANELS for pattern in panel.metrics]
    status = {"disk_free_bytes": 1.0, "checkpoint_age_seconds": 1.0}
    served = parse(page(dict.fromkeys(names, 1.0), status=status, alerts={"stall": False}))
    asked = [re.search(r"(k3train_\w+)\{", query)[1] for query in queries(dashboard())]
    assert set(asked) == {family for family, _ in served}


def test_every_panel_is_on_the_dashboard_beside_the_others():
    panels = dashboard()["panels"]
    titles = [panel["title"] for panel in panels]
    assert {panel.title for panel in PANELS} <= set(titles)
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        spot = panel["gridPos"]
        cells = {(spot["x"] + x, spot["y"] + y) for x in range(spot["w"]) for y in range(spot["h"])}
        assert not cells & taken
        taken |= cells


def test_a_star_of_a_pattern_stands_for_a_label():
    assert sample_of("time/*").labels == {"phase": "*"}
    assert sample_of("moe/bias_range/layer_*") == ("k3train_moe_bias_range", {"layer": "*"}, 1.0)

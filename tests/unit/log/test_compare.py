import json
import math
import re

import pytest
import yaml

from k3train.errors import UserError
from k3train.log import events
from k3train.log.compare import beside, best_of, names_of, write_comparison
from k3train.log.curves import Series
from k3train.log.metrics import MetricsLog
from k3train.log.report import load
from launch.report import main


def fill(folder, losses, config, **more):
    folder.mkdir(parents=True)
    log = MetricsLog(folder, resume_step=0)
    for step, loss in enumerate(losses, 1):
        log.write(step, {"loss": loss} | {name: values[step - 1] for name, values in more.items()})
    log.close()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def runs(tmp_path):
    layers = {f"moe/bias_range/layer_{n}": [0.1 * n, 0.5 - 0.1 * n, 0.3] for n in (1, 2)}
    speed = {"tokens_per_second": [100.0, 100.0, 100.0]}
    same = {"model": {"num_layers": 4, "moe": {"top_k": 2}}}
    one = fill(
        tmp_path / "a",
        [4.0, 2.0, 2.5],
        same | {"run": {"name": "base"}, "optim": {"lr": 1e-3}},
        **layers,
        **speed,
    )
    faster = {"tokens_per_second": [100.0, 120.0, 140.0]}
    config = same | {"run": {"name": "<b>new</b>"}, "optim": {"lr": 2e-3}, "log": {"every": 2}}
    two = fill(tmp_path / "b", [4.0, 3.0, 2.0], config, **faster)
    events.append(one, 2, "alert", "stall: slow")
    events.append(two, 1, "resumed", "behind </script> step 1")
    return [one, two]


def cells(text, first):
    """Cells of the row whose first one is `first`."""
    row = re.search(rf"<tr><td>{re.escape(first)}</td>(.*?)</tr>", text)[1]
    return re.findall(r"<td>(.*?)</td>", row)


def test_results_stand_beside_the_first_run(runs, tmp_path):
    text = write_comparison(runs, tmp_path / "out.html").read_text()
    assert cells(text, "loss") == [
        "2.5000; min 2.0000 at 2",
        "2.0000 (-20.00 %); min 2.0000 at 3",
    ]
    assert cells(text, "Tokens per second, median of recent lines") == ["100", "120 (+20.00 %)"]
    assert cells(text, "Steps") == ["3", "3"]


def test_only_keys_that_differ_are_listed(runs, tmp_path):
    text = write_comparison(runs, tmp_path / "out.html").read_text()
    part = text.partition("Keys that differ")[2].partition("</section>")[0]
    assert set(re.findall(r"<tr><td>([^<]*)</td>", part)) == {"optim.lr", "run.name", "log.every"}
    assert cells(part, "optim.lr") == ["0.001", "0.002"]
    assert cells(part, "log.every") == ["-", "2"]
    again = write_comparison([runs[0], runs[0]], tmp_path / "same.html").read_text()
    assert "No key differs." in again


def test_curves_of_a_run_keep_its_colour_where_the_other_has_none(runs, tmp_path):
    text = write_comparison(runs[::-1], tmp_path / "out.html").read_text()
    figures = re.findall(r"<figure.*?</figure>", text, re.S)
    (bias,) = [figure for figure in figures if "Router bias range, greatest of the layers" in figure]
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', bias)[1])
    (line,) = data["series"]
    assert (line["name"], line["run"], line["colour"]) == ("base", 1, "var(--line-2)")
    # The greater of layers 1 and 2 at each step.
    assert line["points"] == [[1, 0.2], [2, 0.4], [3, 0.3]]
    (loss,) = [figure for figure in figures if "<h3>loss " in figure]
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', loss)[1])
    assert [line["points"] for line in data["series"]] == [
        [[1, 4.0], [2, 3.0], [3, 2.0]],
        [[1, 4.0], [2, 2.0], [3, 2.5]],
    ]


def test_names_are_escaped_told_apart_and_nothing_is_loaded(runs, tmp_path):
    text = write_comparison(runs, tmp_path / "out.html").read_text()
    assert "<b>new" not in text
    assert "behind &lt;/script&gt; step 1" in text
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", text)
    events_part = text.partition("<h2>Events</h2>")[2]
    assert events_part.index("resumed") < events_part.index("stall: slow")
    both = names_of([load(runs[0]), load(runs[0])])
    assert both == [str(runs[0]), f"{runs[0]} (2)"]


def test_values_that_are_missing_or_not_finite():
    assert best_of(Series("loss", [], 3), "min") is None
    assert best_of(Series("x", [(1, 2.0), (2, 5.0), (3, 1.0)]), "max").best == 5.0
    assert beside(["1", "-", "2"], [1.0, None, 2.0]) == ["1", "-", "2 (+100.00 %)"]
    assert beside(["0", "2"], [0.0, 2.0]) == ["0", "2"]
    assert beside(["-", "2"], [None, 2.0]) == ["-", "2"]


def test_runs_that_have_just_started_or_diverged(tmp_path):
    empty = fill(tmp_path / "empty", [], {})
    broken = fill(tmp_path / "broken", [math.nan, math.nan], {})
    assert "No metrics have been logged yet." in write_comparison([empty, empty], tmp_path / "x").read_text()
    text = write_comparison([empty, broken], tmp_path / "x").read_text()
    assert "2 values of loss of broken not finite" in text


def test_the_command(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = [str(run) for run in runs]
    assert main(names) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    assert main([*names, f"out={tmp_path}/two.html"]) == 0
    assert (tmp_path / "two.html").read_text().startswith("<!doctype html>")
    assert main(names[:1]) == 0
    assert capsys.readouterr().out.endswith("report.html\n")
    for arguments, reason in (
        ([], "no run folder given"),
        ([names[0], "out=x.html"], "out=x.html: a comparison's"),
        ([names[0], str(tmp_path / "none")], "none: no such run folder"),
        (names * 5, "10 run folders; at most 8"),
        ([*names, "out=none/x.html"], "out=none/x.html: cannot be written"),
    ):
        with pytest.raises(UserError, match=re.escape(reason)):
            main(arguments)

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from k3train.errors import UserError
from k3train.log.timeline import Recording, write
from launch import cli
from launch.help import verb
from launch.plan import OPTIONS, main, measured_tiers
from parallel.pipeline.build import build
from parallel.pipeline.simulate import Costs, simulate
from parallel.pipeline.vision_fill import inline

TINY = ("recipe=tiny", "parallel=pp2_vpp2", "run.microbatches=4")


def planned(capsys, *arguments) -> dict:
    assert cli.main(["plan", *TINY, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def record(folder: Path, pipeline: int = 2, virtual: int = 2, images: bool = True) -> Path:
    """A run folder in which stage i took (i + 1) seconds forward and twice that backward.

    The tower took a quarter of a second for each micro-batch, and twice that backward.
    """
    folder.mkdir(parents=True, exist_ok=True)
    times = [float(stage + 1) for stage in range(pipeline * virtual)]
    table = build("interleaved" if virtual > 1 else "1f1b", pipeline, virtual, 8)
    costs = Costs(times, [2 * time for time in times])
    if images:
        table = inline(table, [1] * 8)
        costs = replace(costs, vision_forward=[[0.25]] * 8, vision_backward=[[0.5]] * 8)
    timeline = simulate(table, costs)
    ranks = [
        [(*op, start, end) for op, start, end in zip(ops, starts, ends, strict=True)]
        for ops, starts, ends in zip(table.ranks, timeline.starts, timeline.ends, strict=True)
    ]
    write(folder, Recording(table.layout, table.name, {1: ranks}))
    return folder


def test_equal_chunks_give_the_closed_formula(capsys) -> None:
    pipeline = planned(capsys, "costs=uniform")["pipeline"]
    assert pipeline["bubble_over_compute"] == 1 / 8
    assert pipeline["schedule"] == "interleaved" and pipeline["idle_seconds"] == [3.0, 3.0]


def test_flops_are_what_costs_come_from(capsys) -> None:
    assert planned(capsys) == planned(capsys, "costs=entry")
    assert planned(capsys)["pipeline"]["unit"] == "s"


def test_other_schedules_can_be_looked_at(capsys) -> None:
    assert planned(capsys, "schedule=zbv")["pipeline"]["schedule"] == "zbv"
    gpipe = planned(capsys, "parallel=pp2", "schedule=gpipe", "costs=uniform")["pipeline"]
    assert gpipe["peak_microbatches"] == [4, 4]


def test_costs_of_a_run(capsys, tmp_path) -> None:
    run = record(tmp_path / "run")
    found = planned(capsys, f"costs.from={run}")
    # Of another number of micro-batches than recorded: the stages are what must be the same.
    assert found["pipeline"]["unit"] == "s"
    busy = [found["pipeline"]["makespan"] - idle for idle in found["pipeline"]["idle_seconds"]]
    assert found["pipeline"]["vision_seconds"] == pytest.approx(4 * 0.75)
    assert sum(busy) == pytest.approx(4 * (3 * (1 + 2 + 3 + 4) + 0.75))
    assert any("as in the run on average" in line for line in found["assumptions"])
    alone = planned(capsys, f"costs.from={run}", "vision=none", "data.images=[]")["pipeline"]
    busy = [alone["makespan"] - idle for idle in alone["idle_seconds"]]
    assert busy == pytest.approx([4 * 3 * (1 + 3), 4 * 3 * (2 + 4)])
    assert found["pipeline"]["makespan_by_mode"]["none"] == alone["makespan"]
    behind = ("vision_gradients", "optimizer", "newton_schulz", "balance")
    pipeline = {name: part for name, part in found["step_seconds_by_part"].items() if name not in behind}
    assert sum(pipeline.values()) == pytest.approx(found["pipeline"]["makespan"])


def test_images_are_as_many_as_stated(capsys) -> None:
    found = planned(capsys, "images=3x4x8")
    assert found["pipeline"]["images"] == {"count": 3, "grid": [1, 4, 8], "stated": True}
    assert planned(capsys)["pipeline"]["images"] == {"count": 1, "grid": [1, 8, 8], "stated": False}
    assert found["pipeline"]["vision_seconds"] > planned(capsys)["pipeline"]["vision_seconds"]


@pytest.mark.parametrize("mode", ["bubbles", "inline", "phase"])
def test_the_text_tells_how_much_of_the_tower_is_hidden(capsys, mode) -> None:
    assert cli.main(["plan", *TINY, "images=8x8x8", f"vision.mode={mode}"]) == 0
    captured = capsys.readouterr()
    printed = " ".join(captured.out.replace("│", " ").split())
    assert "8 x 8x8 patches a micro-batch" in printed and "hidden; the bubble has room for" in printed
    assert "on the first stage" in printed and "in a phase of its own" in printed
    assert "without images" in printed
    assert captured.err == ""


def test_a_long_fill_is_explained_on_stderr_alone(capsys) -> None:
    overrides = ["run.microbatches=256", "offload.sites.vit.layer=keep", "--json"]
    assert cli.main(["plan", *TINY[:2], *overrides]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"]["hidden_fraction"] > 0.5


def test_pictures_are_written_where_asked(capsys, tmp_path) -> None:
    run = record(tmp_path / "run")
    folder = tmp_path / "new" / "pictures"
    assert cli.main(["plan", *TINY, f"costs.from={run}", f"out={folder}"]) == 0
    printed = capsys.readouterr().out
    names = [
        "activations.svg",
        "plan.html",
        "timeline.html",
        "timeline.png",
        "timeline.svg",
        "timeline.trace.json",
    ]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all(str(folder / name) in printed for name in names)
    assert ElementTree.fromstring((folder / "timeline.svg").read_text()).tag.endswith("svg")
    with Image.open(folder / "timeline.png") as image:
        assert image.format == "PNG"
    whole = (folder / "plan.html").read_text()
    assert all(
        f"<h2>{name}</h2>" in whole for name in ("Step of the busiest rank", "Memory of a rank", "planned")
    )
    assert "http" not in whole and "<script" not in whole
    page = (folder / "timeline.html").read_text()
    assert "<h2>planned</h2>" in page and "<h2>measured</h2>" in page and "tokens/s" in page
    trace = json.loads((folder / "timeline.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == 2 * 2 * 2 * 4 + 2 * 4
    assert sum(event["name"].startswith("VF") for event in trace) == 4


def test_nothing_is_written_unasked_and_the_text_says_how(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *TINY]) == 0
    printed = capsys.readouterr().out
    assert "add out=FOLDER" in printed
    assert list(tmp_path.iterdir()) == []
    assert all(word in printed for word in ("AttnRes rows", "cached", "published", "naive", "idle"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["cost=uniform"], "cost=uniform: no such key; did you mean costs?"),
        (["costs=unifrom"], "costs=unifrom: no such costs; valid are entry, uniform, or costs.from=RUN"),
        (["out="], "out=: has no value; out= takes a folder"),
        (["schedule=zb2p"], "schedule=zb2p: schedule is 'zb2p'; choose one of gpipe"),
        (["schedule=1f1b"], "schedule=1f1b: virtual is 2"),
        (["costs.from=nowhere"], "nowhere/timeline.json: no such file"),
        (["--draw"], "--draw: not an override"),
        (
            ["costs.from=run1"],
            "parallel.pipeline=4 parallel.virtual=1 were recorded, not 2 and 2",
        ),
        (["images=4"], "images=4: takes COUNTxROWSxCOLUMNS in patches, for example 4x64x48"),
        (["images=0x8x8"], "images=0x8x8: takes COUNTxROWSxCOLUMNS"),
        (["images=1x3x4"], "images=1x3x4: item 0: grid (t, h, w) = (1, 3, 4): 3 x 4 does not divide by"),
        (["images=65x4x4"], "images=65x4x4: 260 tokens, and a micro-batch has 256"),
        (["images=1x4x4", "vision=none", "data.images=[]"], "images=1x4x4: needs a vision tower"),
        (["images=1x4x4", "costs=uniform"], "images=1x4x4: costs=uniform has no images; leave one out"),
        (["images=1x4x4", "costs.from=run2"], "costs.from=run2 has the images of its run; leave one out"),
        (["costs.from=run3"], "costs.from=run3: no images went through its recorded steps"),
        (["costs.from=run2", "costs=uniform"], "costs=uniform: stands beside costs.from=run2; leave one out"),
        (["out=file"], "out=file: cannot be written"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, tmp_path, monkeypatch, arguments, told) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run1", 4, 1)
    record(tmp_path / "run2")
    record(tmp_path / "run3", images=False)
    (tmp_path / "file").write_text("")
    assert cli.main(["plan", *TINY, *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line


def test_the_help_lists_the_arguments() -> None:
    text = verb("plan")
    assert all(f"{option}=" in text for option in OPTIONS)
    places = [text.index(f"  {option}=") for option in ("out", "costs", "costs.from", "schedule", "images")]
    assert all(before < after for before, after in pairwise(places))


def test_measured_tiers_become_keys_of_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "tiers.json"
    rows = [
        {"tier": "host", "direction": "out", "GB/s": 52.125, "large": True},
        {"tier": "host", "direction": "in", "GB/s": 48.5, "large": True},
        {"tier": "host", "direction": "in", "GB/s": 12.0, "large": False},
        {"tier": "nvme", "direction": "out", "GB/s": 2.5, "large": True},
        {"tier": "nvme", "direction": "in", "GB/s": 6.0, "large": True},
    ]
    path.write_text(json.dumps({"rows": rows}))
    assert measured_tiers(path) == [
        "cluster.host_gbps=48.5",
        "cluster.nvme_write_gbps=2.5",
        "cluster.nvme_read_gbps=6",
    ]
    path.write_text("[]")
    with pytest.raises(UserError, match=r"has no figures of tiers; .*offload_tiers\.py --json"):
        measured_tiers(path)
    with pytest.raises(UserError, match="cannot be read"):
        measured_tiers(tmp_path / "other.json")


def test_a_policy_is_shown_by_site_and_tier_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["recipe=tiny", "vision=none", "data.images=[]", "offload.policy=host", "offload.min_kib=0"]
    assert main([*overrides, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    found = planned["activations"]
    sites = {entry["site"]: entry for entry in found["sites"]}
    assert sites["kda.core"]["storage"] == "host" and sites["head"]["storage"] == "keep"
    assert sites["kda.core"]["pattern"] == "*" and sites["kda.core"]["place"] == "host"
    assert all(rank["host"] > 0 for rank in found["tiers"]) and found["policy"] == "host"
    assert all("offload_windows" in rank for rank in planned["memory_bytes"])
    assert main([*overrides, f"out={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "Activations, policy host" in text and "kda.core" in text
    assert "host memory" in (tmp_path / "activations.svg").read_text()
    assert "activations held over the step" in (tmp_path / "timeline.html").read_text()


def test_a_budget_is_solved_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["recipe=tiny", "vision=none", "data.images=[]", "offload.budget_gb=0.23"]
    assert main([*overrides, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["activations"]["policy"] == "budget"
    assert max(sum(rank.values()) for rank in planned["memory_bytes"]) <= 0.23e9
    changed = [entry for entry in planned["activations"]["sites"] if entry["storage"] != "keep"]
    assert changed and all(entry["why"] for entry in changed if entry["saved_bytes"])

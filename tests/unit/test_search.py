"""The search for layouts against planning all of them, and what it prints."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from k3train.errors import UserError
from k3train.plan import plan
from k3train.search import Found, Planner, search
from k3train.search_bounds import Bounds, Cut, Shape
from k3train.search_reference import search_all
from k3train.search_space import Space, balanced, divisors
from k3train.validate import validate
from launch import cli
from launch.plan_search import space_of

TINY = ("recipe=tiny", "vision=none", "data.images=[]", "optim=adamw", "cluster.gpus=8")
FEW = ("parallel.pipeline=2", "parallel.context=1", "parallel.zero=1", "offload.policy=recompute")
SMALL = (*TINY, "model.num_layers=4", "batch", "data.sequence_length=128")


IMAGES = ("vision=tiny", "data.images=[photos]")


def small(*overrides: str, batch: str = "4096", fixed_memory: float | None = None) -> Space:
    chosen = [each for each in (*SMALL, *overrides) if each != "batch"]
    if fixed_memory is not None:
        chosen.append(f"cluster.memory_gib={fixed_memory}")
    return space_of(chosen, batch)


def names(found: Found) -> list[tuple[object, ...]]:
    return [(*each.layout.name, *each.order) for each in found.best]


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.zero=1", "offload.policy=recompute", "parallel.context=1"),
        ("parallel.context=1", "parallel.expert.size=2", "data.micro_batch_size=2", "parallel.pipeline=2"),
        ("parallel.pipeline=4", "offload.policy=host", "parallel.context=2"),
    ],
)
@pytest.mark.parametrize("memory", [3.0, 0.12])
def test_pruning_loses_nothing(overrides: tuple[str, ...], memory: float) -> None:
    space = small(*overrides, fixed_memory=memory)
    every, found = search_all(space), search(space)
    assert every.best
    assert names(found) == names(every)
    assert found.planned <= every.planned


@pytest.mark.parametrize("memory", [3.0, 0.1, 0.07])
@pytest.mark.parametrize("mode", ["bubbles", "inline"])
def test_pruning_loses_nothing_with_a_tower(mode: str, memory: float) -> None:
    chosen = ("parallel.expert.size=2", "parallel.context=1", "offload.policy=recompute", "parallel.zero=1")
    space = small(*IMAGES, f"vision.mode={mode}", *chosen, fixed_memory=memory, batch="2048")
    every, found = search_all(space), search(space)
    assert every.best and names(found) == names(every)
    assert found.planned <= every.planned
    assert all(sum("vision" in kind for kind in each.ranks[0]) == 3 for each in found.best)


@pytest.mark.parametrize("images", [(), IMAGES])
def test_no_layout_holds_or_takes_less_than_its_bounds(images: tuple[str, ...]) -> None:
    space = small("parallel.expert.size=2", "parallel.zero=2", "offload.gradients=host", *images)
    bounds, planner = Bounds(space), Planner(space)
    checked = 0
    for layout in list(space.layouts())[::23]:
        planned = planner.plan(layout)
        if planned is None or planned.step is None:
            continue
        cut, shape = Cut(layout.pipeline, layout.virtual, layout.cut), Shape(*_shape(layout))
        place = space.experts(layout.pipeline).index(layout.expert), space.states.index(layout.states)
        held = bounds.held(cut, shape, layout.microbatches)[place]
        assert held <= planned.bytes * (1 + 1e-9), layout
        seconds = bounds.seconds(cut, shape, layout.expert, layout.microbatches)
        assert seconds <= planned.step.seconds * (1 + 1e-9), layout
        checked += 1
    assert checked > 10


def _shape(layout) -> tuple[int, int, str]:
    return layout.context, layout.size, layout.policy


@pytest.mark.parametrize("images", [(), IMAGES])
def test_what_it_prints_is_what_plan_prints(images: tuple[str, ...], capsys) -> None:
    given = [*TINY, *images, "parallel.context=1"]
    assert cli.main(["plan", "search", *given, "--json", "--top", "3"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 3
    assert [row["step_seconds"] for row in rows] == sorted(row["step_seconds"] for row in rows)
    for row in rows:
        arguments = shlex.split(row["command"]["plan"])
        assert cli.main([*arguments[1:], "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert planned["world_size"] == 8
        assert planned["step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-12)
        assert max(sum(held.values()) for held in planned["memory_bytes"]) == row["memory_bytes"]
        assert planned["tokens_per_step"] == row["tokens_per_step"]
        assert planned["mfu"] == pytest.approx(row["mfu"], rel=1e-12)
        assert row["memory_bytes"] <= row["memory_limit_bytes"] and row["reasons"]


def test_a_page_has_the_frontier(tmp_path, capsys) -> None:
    assert cli.main(["plan", "search", *TINY, *FEW, f"out={tmp_path}", "--top=2"]) == 0
    shown = capsys.readouterr().out
    assert "8 GPUs" in shown and "k3train train" in shown
    text = (tmp_path / "search.html").read_text()
    assert text.count("<circle") >= 2 and "<table" in text


def test_nothing_fits_says_by_how_much_and_what_would_do(capsys) -> None:
    arguments = ["plan", "search", *TINY, "parallel.context=1", "cluster.memory_gib=0.05"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert "nothing fits into 0.045 GiB; the nearest misses by" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch=1000"], "batch=1000: tokens of a step, a multiple of data.sequence_length=256"),
        (["cluster.gpus=-3"], "cluster.gpus=-3: must be at least 1"),
        (["cluster.gpus=0"], "cluster.gpus=0: must be at least 1"),
        (["--top", "0"], "--top 0: takes a number of layouts"),
        (["offload.budget_gb=1"], "offload.budget_gb: a search chooses among policies"),
    ],
)
def test_refusals(arguments: list[str], said: str, capsys) -> None:
    assert cli.main(["plan", "search", *TINY, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_layout_of_other_gpus_is_refused() -> None:
    space = small()
    layout = next(iter(space.layouts()))
    config = space.configure(layout)
    validate(config, 8, inputs=False)
    other = replace(config, cluster=replace(config.cluster, gpus=16))
    with pytest.raises(UserError, match=r"cluster\.gpus=16: the layout has 8 ranks"):
        validate(other, 8, inputs=False)


def test_nodes_are_those_of_the_gpus_and_not_the_recipes() -> None:
    space = space_of(["recipe=k3_pretrain", "cluster=h200", "cluster.gpus=256"])
    assert space.config.cluster.gpus_per_node == 8
    assert space.nodes == 32
    cluster = space.configure(next(iter(space.layouts()))).cluster
    assert (cluster.nodes, cluster.ranks_per_node) == (32, 8)


def test_states_leave_for_the_host_only_as_far_as_it_has_room() -> None:
    """In the 0.12 GiB of a device nothing fits that leaves its states there."""
    tight = ("parallel.context=1", "parallel.zero=1", "offload.policy=recompute", "offload.optimizer=host")
    roomy, none = (small(*tight, f"cluster.host_gib={size}") for size in (1.0, 1e-4))
    found = search(roomy).best[0]
    sizes = plan(found.config, 8)["parameters"]["by_kind"]
    assert found.layout.expert == found.layout.data == 8, "every state is cut into eight"
    assert found.host == pytest.approx(sum(sizes.values()) * 12 / 8, rel=1e-3)
    assert plan(found.config, 8)["host_bytes"][0] == {"optimizer": found.host}
    assert not search(none).best


def test_too_little_host_memory_is_said(capsys) -> None:
    arguments = ["plan", "search", *TINY, *FEW, "offload.optimizer=host"]
    assert cli.main([*arguments, "cluster.host_gib=0.0001"]) == 2
    error = capsys.readouterr().err
    assert "in host memory" in error and "cluster.host_gib" in error and error.count("\n") == 1


def test_chunks_are_balanced_by_weight() -> None:
    assert balanced([1.0] * 6 + [3.0], 3) == (3, 3, 1)
    assert sum(balanced([1.0, 2.0, 3.0, 4.0, 5.0], 2)) == 5
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.slow
@pytest.mark.parametrize("images", [[], ["vision=moonvit_v2", "data.images=[photos]"]])
def test_k3_on_a_thousand_gpus(images: list[str]) -> None:
    space = space_of(["recipe=k3_pretrain", "cluster=h200", "cluster.gpus=1024", *images])
    assert space.tokens == 128 * 4096 * 128
    found = search(space)
    assert len({each.layout.name for each in found.best}) == 10
    for each in found.best:
        layout = each.layout
        assert layout.pipeline * layout.context * layout.data == 1024
        assert layout.microbatches * layout.size * layout.data == space.samples
        assert each.bytes <= found.limit
        validate(each.config, 1024, inputs=False)
    assert found.planned < 500 < found.bounded

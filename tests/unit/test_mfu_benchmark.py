"""Time of a trace's moments goes to the right operators, floors are the plan's, and rows sum to the step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import floor_table, floors
from benchmarks.common.attribution import (
    ACCUMULATE,
    AGAIN,
    BACKWARD,
    COPIES,
    FORWARD,
    IDLE,
    STEP,
    UNATTRIBUTED,
    Attribution,
    Label,
    Spent,
    attribute,
)  # fmt: skip
from benchmarks.common.floors import Ceilings
from k3train import flops, operators
from k3train.activation_sites import sites
from k3train.config import Config
from k3train.microbatch import tokens_per_microbatch
from launch.compose import compose, resolve_layout

from .test_benchmarks import quick

pytestmark = pytest.mark.timeout(180)

NODE = "autograd::engine::evaluate_function: "
MAIN, ENGINE = 1, 2
TINY = ("recipe=tiny", "parallel=single", "vision=none", "data.images=[]")
SMALL = (*TINY, "model.num_layers=4", "data.sequence_length=64", "run.microbatches=2", "optim=adamw")


def event(cat: str, name: str, begin: float, end: float, tid: int, **args: Any) -> dict[str, Any]:
    """Of a trace, microseconds."""
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args}


def host(name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    """An operation of a host thread."""
    return event("cpu_op", name, begin, end, tid)


def named(name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    """A range."""
    return event("user_annotation", name, begin, end, tid)


def arrow(number: int, forward: tuple[int, float], backward: tuple[int, float]) -> list[dict[str, Any]]:
    """From an operation to its node of autograd, by thread and beginning."""
    ends = (("s", forward), ("f", backward))
    return [
        {"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 1, "tid": tid, "ts": ts}
        for ph, (tid, ts) in ends
    ]


def launch(correlation: int, at: float, tid: int = MAIN) -> dict[str, Any]:
    """The host starts a kernel."""
    return event("cuda_runtime", "cudaLaunchKernel", at, at + 1, tid, correlation=correlation)


def kernel(
    correlation: int | None, begin: float, end: float, cat: str = "kernel", name: str = "k"
) -> dict[str, Any]:
    """The device runs it."""
    return event(cat, name, begin, end, 7, **({} if correlation is None else {"correlation": correlation}))


def seconds(found: Attribution) -> dict[tuple[str, str, str, str], float]:
    """Microseconds by label, without what is nothing."""
    return {tuple(label): round(1e6 * each.seconds, 6) for label, each in found.spent.items() if each.seconds}  # type: ignore[misc]


def step(engine: int) -> list[dict[str, Any]]:
    """A step of 100 us: forward of a region in a layer, its backward with a second forward, an update.

    `engine`: the thread of backwards; that of forwards on a CPU.
    """
    return [
        named(STEP, 0, 100),
        named("k3.phase:forward_backward", 5, 70),
        named("k3.part:kda+moe", 10, 30),
        named("k3.op:layer", 11, 29),
        named("k3.op:kda.input", 12, 22),
        host("aten::linear", 13, 21),
        host("aten::mm", 14, 20),
        host("aten::add", 23, 26),
        host(f"{NODE}AddBackward0", 40, 42, engine),
        host("AddBackward0", 40.5, 41, engine),
        host(f"{NODE}MmBackward0", 43, 60, engine),
        host("MmBackward0", 44, 59, engine),
        named("k3.op:kda.input", 45, 51, engine),
        host("aten::linear", 46, 50, engine),
        host("aten::mm", 52, 58, engine),
        host(f"{NODE}torch::autograd::AccumulateGrad", 61, 64, engine),
        host(f"{NODE}Unknown", 65, 66, engine),
        named("k3.phase:optimizer", 75, 95),
        named("k3.op:optimizer.update", 76, 90),
        *arrow(1, (MAIN, 14), (engine, 44)),
        *arrow(2, (MAIN, 23), (engine, 40.5)),
        {"ph": "M", "name": "process_name", "pid": 1},
    ]  # fmt: skip


def test_host_times_are_each_events_own_and_sum_to_the_step() -> None:
    found = attribute(step(MAIN))
    phase, layer = "forward_backward", "kda+moe"
    assert seconds(found) == {
        ("", "", UNATTRIBUTED, FORWARD): 100 - 65 - 20,
        (phase, "", UNATTRIBUTED, FORWARD): 65 - 20 - 2 - 17 - 3 - 1,
        (phase, layer, UNATTRIBUTED, FORWARD): 2,
        (phase, layer, "layer", FORWARD): 18 - 10,
        (phase, layer, "kda.input", FORWARD): 10,
        (phase, layer, "layer", BACKWARD): 2,
        (phase, layer, "kda.input", BACKWARD): 17 - 6,
        (phase, layer, "kda.input", AGAIN): 6,
        (phase, "", ACCUMULATE, BACKWARD): 3,
        (phase, "", UNATTRIBUTED, BACKWARD): 1,
        ("optimizer", "", UNATTRIBUTED, FORWARD): 6,
        ("optimizer", "", "optimizer.update", FORWARD): 14,
    }
    assert (found.steps, round(1e6 * found.seconds)) == (1, 100)
    assert found.calls["kda.input", FORWARD] == found.calls["kda.input", AGAIN] == 1


def test_kernels_belong_to_where_they_were_launched() -> None:
    launches = [
        launch(1, 15), launch(2, 24), launch(3, 47, ENGINE), launch(4, 53, ENGINE), launch(5, 62, ENGINE),
        launch(6, 80), launch(7, 81), launch(8, 2), launch(9, 3),
    ]  # fmt: skip
    kernels = [
        kernel(1, 20, 30),
        kernel(2, 30, 34),
        kernel(3, 50, 56),
        kernel(4, 54, 60),
        kernel(5, 66, 70),
        kernel(6, 85, 91, "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)"),
        kernel(7, 84, 88),
        kernel(None, 93, 94),
        kernel(8, 94, 94),
        kernel(9, 96, 97, "gpu_memcpy", "Memcpy DtoD (Device -> Device)"),
        kernel(99, 120, 130),
    ]
    found = attribute([*step(ENGINE), *launches, *kernels])
    layer = "kda+moe"
    busy = {
        ("forward_backward", layer, "kda.input", FORWARD): 10,
        ("forward_backward", layer, "layer", FORWARD): 4,
        ("forward_backward", layer, "kda.input", AGAIN): 4 + 2 / 2,
        ("forward_backward", layer, "kda.input", BACKWARD): 2 / 2 + 4,
        ("forward_backward", "", ACCUMULATE, BACKWARD): 4,
        ("optimizer", "", "optimizer.update", FORWARD): 4,
        ("optimizer", "", COPIES, FORWARD): 3,
        ("", "", UNATTRIBUTED, FORWARD): 1 + 1,
    }
    idle = {("", "", IDLE, FORWARD): 20 + 16 + 6 + 14 + 2 + 2 + 3}
    assert seconds(found) == busy | idle
    assert sum(seconds(found).values()) == 100
    waits = {tuple(label)[2:]: 1e6 * each.waits for label, each in found.spent.items() if each.waits}
    assert waits == pytest.approx(
        {("kda.input", FORWARD): 20, ("kda.input", AGAIN): 16, (ACCUMULATE, BACKWARD): 6,
         ("optimizer.update", FORWARD): 14, (UNATTRIBUTED, FORWARD): 4}
    )  # fmt: skip
    assert [round(1e6 * gap) for gap in found.gaps] == [16, 6, 14, 2, 2]
    assert sum(each.launches for each in found.spent.values()) == len(kernels) - 1, "one is outside the step"


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no k3.step"):
        attribute([host("aten::mm", 0, 1)])


@pytest.mark.parametrize("untraced", [150e-6, 80e-6, 20e-6])
def test_a_step_keeps_its_length_without_the_tracing(untraced: float) -> None:
    traces = {
        "host": step(MAIN),
        "device": [*step(ENGINE), launch(1, 15), launch(2, 80), kernel(1, 20, 50), kernel(2, 90, 100)],
    }
    for name, events in traces.items():
        found = attribute(events)
        spent = floor_table.settled(found, untraced)
        assert sum(each.seconds for each in spent.values()) == pytest.approx(untraced)
        if name == "device" and untraced > 40e-6:
            update = next(each for label, each in spent.items() if label.operator == "optimizer.update")
            assert update.seconds == pytest.approx(10e-6), "kernels take what they took"
            assert sum(each.waits for each in spent.values()) == pytest.approx(untraced - 40e-6)


def config(*overrides: str) -> Config:
    """Of one rank."""
    return resolve_layout(compose(list(overrides)), 1)


CASES = {
    "slice": ("recipe=h200_slice",),
    "small": ("recipe=h200_small",),
    "moonep": ("recipe=h200_slice", "parallel.expert.dispatcher=moonep"),
    "tiny": SMALL,
}


@pytest.mark.parametrize("case", CASES)
def test_work_of_a_step_is_all_model_flops_and_no_more(case: str) -> None:
    local = config(*CASES[case])
    work = floors.work_of_step(local)
    tokens = tokens_per_microbatch(local) * local.run.microbatches
    spent = flops.forward_flops_per_token(local.model, local.data.sequence_length)
    if not local.model.mtp_layers:
        spent.pop("mtp", None)
    ways = {
        way: sum(each.flops for key, each in work.items() if key[2] == way) for way in (FORWARD, BACKWARD)
    }
    assert ways[FORWARD] == pytest.approx(tokens * sum(spent.values()))
    assert ways[BACKWARD] == pytest.approx(2 * ways[FORWARD])
    assert all(each.flops >= 0 and each.bytes >= 0 and each.flops + each.bytes > 0 for each in work.values())
    again = {name for _, name, way in work if way == AGAIN}
    assert ("kda.input" in again, "head" in again) == (case in ("slice", "moonep"), False)
    named_sites = {site.name for site in sites(local)} | {"embedding", ACCUMULATE, "mtp.fusion"}
    assert {name for _, name, _ in work} <= named_sites


def test_floors_are_below_the_plan_at_the_same_ceilings() -> None:
    local = config("recipe=h200_slice")
    ceilings = Ceilings(700e12, 4e12, "made up")
    planned = operators.Operators(floors.at_ceilings(local, ceilings)).stage(range(local.model.num_layers))
    forward = {
        key: ceilings.floor(each) for key, each in floors.work_of_step(local).items() if key[2] == FORWARD
    }
    # The plan adds products and what moves, a floor is the larger of both.
    whole = local.run.microbatches * sum(planned.forward.values())
    assert 0.85 * whole < sum(forward.values()) < whole
    products = sum(time for kind, time in planned.forward.items() if kind.endswith("gemm"))
    gemms = sum(time for (_, name, _), time in forward.items() if floors.class_of(name).endswith("gemm"))
    assert gemms == pytest.approx(local.run.microbatches * products, rel=0.02)
    updates = floors.optimizer_floors(local, ceilings)
    assert updates["optimizer.clip"] == pytest.approx(2 * updates["optimizer.norm"])
    assert updates["optimizer.newton_schulz"] > 0.5, "765 TFLOP"


def made_up(local: Config, ceilings: Ceilings, slower: float) -> Attribution:
    """A step in which everything that the lists know takes `slower` times its floor."""
    spent = {}
    for (part, name, way), work in floors.work_of_step(local).items():
        spent[Label("forward_backward", part, name, way)] = Spent(slower * ceilings.floor(work), 1)
    for name, floor in floors.optimizer_floors(local, ceilings).items():
        spent[Label("optimizer", "", name)] = Spent(slower * floor, 1)
    spent[Label(operator=IDLE)] = Spent(0.25)
    return Attribution(1, sum(each.seconds for each in spent.values()), spent, Counter())


@pytest.mark.parametrize(("slower", "wrong"), [(1.0, False), (2.0, False), (0.97, False), (0.9, True)])
def test_a_floor_above_the_time_is_reported(slower: float, wrong: bool) -> None:
    local, ceilings = config("recipe=h200_slice"), Ceilings(700e12, 4e12, "made up")
    found = made_up(local, ceilings, slower)
    entries = floor_table.entries(local, found, ceilings, found.seconds)
    rows = floor_table.operators(entries)
    assert bool(floor_table.impossible(rows)) is wrong
    whole = 1e3 * found.seconds
    for table in (rows, floor_table.parts(entries), floor_table.phases(entries)):
        assert sum(row["ms"] for row in table) == pytest.approx(whole)
        assert sum(row["lost ms"] for row in table) == pytest.approx(
            250 + (slower - 1) / slower * (whole - 250)
        )
        lost = [row["lost ms"] for row in table]
        assert lost == sorted(lost, reverse=True)
        assert sum(row["share"] for row in table) == pytest.approx(1)
    for row in rows:
        if row["operator"] != IDLE:
            assert row["ms"] == pytest.approx(slower * row["floor ms"]), row


def test_every_class_and_site_is_measured_or_absent() -> None:
    local, ceilings = config("recipe=h200_slice"), Ceilings(700e12, 4e12, "made up")
    names = {row["operator"] for row in floor_table.operators(
        floor_table.entries(local, made_up(local, ceilings, 1.0), ceilings, 1.0)
    )}  # fmt: skip
    left = floors.absent(local, names)
    for each in (*operators.CLASSES, *(site.name for site in sites(local))):
        is_measured = each in names or each in {floors.class_of(name) for name in names}
        assert is_measured != (each in left), each
    assert left["launch"].startswith("the host's")
    without = floors.absent(local, {"head"})
    assert {"kda_core", "attention", "grouped_gemm", "kda.core", "layer"} <= without.keys()
    dense = config("recipe=tiny_dense_check")
    assert floors.absent(dense, {"head"})["grouped_gemm"] == "no layer is moe"


def test_a_small_run_accounts_for_its_step(tmp_path: Path) -> None:
    arguments = ("--routing", "zipf", "--plain", "none", "--ceilings", "entry", *SMALL)
    (found,) = quick("mfu", tmp_path / "figures.json", *arguments)["recipes"]
    check(found)
    assert found["routing"]["max over mean"] > 1.5 and len(found["systems"]) == 1
    assert found["ceilings"]["source"] == "cluster=local"
    rows = {(row["operator"], row["way"]): row for row in found["operators"]}
    # Two micro-batches; four layers, of which the first is dense, and one of MLA.
    assert rows["kda.core", FORWARD]["calls"] == 2 * 3 and rows["mla.core", FORWARD]["calls"] == 2
    assert rows["moe.router", FORWARD]["calls"] == 2 * 3 and rows["head", FORWARD]["calls"] == 2
    assert rows["kda.core", BACKWARD]["ms"] > 0 and ("kda.core", AGAIN) not in rows
    assert found["phases"][0]["phase"] == "forward_backward"
    assert found["absent"].keys() == {"launch", "attn_res.bank"}


@pytest.mark.slow
def test_the_quick_run_has_both_systems(tmp_path: Path) -> None:
    (found,) = quick("mfu", tmp_path / "figures.json")["recipes"]
    check(found)
    ours, core = found["systems"]
    assert (ours["system"], core["system"]) == ("k3train", "megatron-core")
    assert ours["ratio tokens/s"] == pytest.approx(ours["tokens/s"] / core["tokens/s"])
    assert ours["ratio MFU"] == pytest.approx(ours["MFU"] / core["MFU"])
    assert core["tried"].keys() == {"local"}


def check(found: dict[str, Any]) -> None:
    """What holds for any run."""
    ours = found["systems"][0]
    for table in ("operators", "parts", "phases"):
        assert sum(row["ms"] for row in found[table]) == pytest.approx(ours["ms/step"])
    peak = found["configuration"]["cluster"]["peak_tflops"]
    assert ours["MFU"] == pytest.approx(ours["TFLOP/step"] / ours["ms/step"] * 1e3 / peak)
    assert ours["HFU"] >= ours["MFU"]
    assert ours["MFU at floor"] * ours["floor ms"] == pytest.approx(ours["MFU"] * ours["ms/step"])
    unknown = next(row["share"] for row in found["operators"] if row["operator"] == UNATTRIBUTED)
    assert unknown < 0.5


def test_a_run_that_cannot_be_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import mfu

    monkeypatch.setattr("sys.argv", ["mfu.py", "--recipe", "h200_small"])
    with pytest.raises(SystemExit, match=r"^h200_small: run\.device=cuda, and torch sees no GPU"):
        mfu.main()

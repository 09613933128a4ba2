"""A table executed by real processes: against megatron-core's own schedules, and no pipeline at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.pipeline.build import build
from parallel.pipeline.rows import RowPlan
from parallel.pipeline.table import Layout
from tests.dist.launch import run_workers
from tests.dist.pipeline_worker import BATCH, LENGTH, SIZE, sequential

pytestmark = pytest.mark.timeout(300)

ROUNDING = 1e-13
ELEMENT_BYTES = 8
Case = dict[str, Any]


def case(virtual: int, microbatches: int, made: list[int] | None = None, **more: Any) -> Case:
    """`made` is set to one row a stage where it is left out."""
    schedule = "interleaved" if virtual > 1 else "1f1b"
    return {
        "schedule": schedule,
        "virtual": virtual,
        "microbatches": microbatches,
        "made": made,
        **more,
    }


def run(pipeline: int, cases: list[Case]) -> list[Any]:
    """All cases on the same processes; for each the losses, the gradients, and what each rank said."""
    for each in cases:
        if each["made"] is None:
            each["made"] = list(range(pipeline * each["virtual"]))
    args = {"pipeline": pipeline, "cases": cases}
    ranks = run_workers("tests.dist.pipeline_worker:pipelined", pipeline, args, timeout=240)
    return [_joined([answers[number] for answers in ranks]) for number in range(len(cases))]


def _joined(answers: list[Any]) -> Any:
    losses = [answer["losses"] for answer in answers if answer["losses"]]
    assert len(losses) == 1, "one rank, that of the last stage, reports losses"
    gradients: dict[str, Any] = {}
    for answer in answers:
        for name, value in answer["gradients"].items():
            tensor = torch.tensor(value, dtype=torch.float64)
            gradients[name] = gradients[name] + tensor if name in gradients else tensor
    return {"losses": losses[0], "gradients": gradients, "ranks": answers}


def assert_equals_sequence(ran: Any, pipeline: int, tried: Case, *, exact: bool) -> None:
    parts = tried.get("parts") or []
    expected = sequential(pipeline, tried["virtual"], tried["microbatches"], tried["made"], parts)
    assert ran["losses"] == expected["losses"]
    assert ran["gradients"].keys() == expected["gradients"].keys()
    for name, value in expected["gradients"].items():
        want = torch.tensor(value, dtype=torch.float64)
        error = float((ran["gradients"][name] - want).norm() / want.norm())
        assert error <= (0 if exact else ROUNDING), (tried, name, error)


def assert_bytes(ran: Any, pipeline: int, tried: Case) -> None:
    """Counted bytes are those of the plan: rows and the running tensor, both ways."""
    layout = Layout(pipeline, tried["virtual"], tried["microbatches"])
    widths = RowPlan(layout, tuple(tried["made"])).rows_sent() + layout.stages - 1
    expected = widths * tried["microbatches"] * LENGTH * BATCH * SIZE * ELEMENT_BYTES
    for flow in ("activation", "gradient"):
        assert sum(answer["bytes"][flow] for answer in ran["ranks"]) == expected, tried


@pytest.mark.parametrize(
    ("pipeline", "shapes"), [(1, [(1, 3)]), (2, [(1, 4), (2, 4), (2, 8), (3, 4)]), (4, [(1, 6), (2, 8)])]
)
def test_a_table_computes_what_megatron_core_does(pipeline: int, shapes: list[tuple[int, int]]) -> None:
    cases = []
    for virtual, microbatches in shapes:
        cases += [
            case(virtual, microbatches) | {"schedule": "megatron"},
            case(virtual, microbatches, cache=False),
        ]
    answers = run(pipeline, cases)
    for (virtual, microbatches), theirs, ours in zip(shapes, answers[::2], answers[1::2], strict=True):
        assert ours["losses"] == theirs["losses"]
        for name, value in theirs["gradients"].items():
            assert torch.equal(ours["gradients"][name], value), name
        table = build("interleaved" if virtual > 1 else "1f1b", pipeline, virtual, microbatches)
        for rank, (ran, core) in enumerate(zip(ours["ranks"], theirs["ranks"], strict=True)):
            assert ran["order"] == core["order"] == [str(op) for op in table.ranks[rank]]


@pytest.mark.parametrize("pipeline", [2, 4])
def test_kept_rows_equal_no_pipeline(pipeline: int) -> None:
    cases = [
        case(1, 3),
        case(2, 5),
        case(3, 5),
        case(2, pipeline - 1),
        case(2, 2 * pipeline + 3, group=pipeline + 1),
    ]
    for tried, ran in zip(cases, run(pipeline, cases), strict=True):
        assert_equals_sequence(ran, pipeline, tried, exact=tried["virtual"] == 1)
        assert_bytes(ran, pipeline, tried)


def test_any_stage_may_make_any_number_of_rows() -> None:
    cases = [case(3, 4, made) for made in ([0, 0, 2, 2, 2, 5], [1, 1, 4], [5], [])]
    for tried, ran in zip(cases, run(2, cases), strict=True):
        assert_equals_sequence(ran, 2, tried, exact=False)
        assert_bytes(ran, 2, tried)


def test_gpipe() -> None:
    tried = case(1, 4) | {"schedule": "gpipe"}
    assert_equals_sequence(run(2, [tried])[0], 2, tried, exact=True)


def test_a_tower_in_the_pipeline_equals_the_tower_first() -> None:
    cases = [
        case(virtual, 5, vision=vision, parts=[2, 1, 0, 3, 1])
        for virtual in (1, 2)
        for vision in ("bubbles", "inline", "phase")
    ]
    for tried, ran in zip(cases, run(2, cases), strict=True):
        assert_equals_sequence(ran, 2, tried, exact=False)
        assert all(answer["reductions"] == [1] * (1 + tried["virtual"]) for answer in ran["ranks"])

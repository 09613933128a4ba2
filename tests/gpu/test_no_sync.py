"""Steady steps on a GPU under torch's own check of synchronisations, set to raise.

Where the host has to wait is listed: three reads a step, and with experts an event a layer, for sizes that it
needs to start an exchange. Under packed documents flash-linear-attention reads the documents' borders once a
micro-batch. `tests/unit/train/test_no_sync.py` asks the same on a CPU, where copies between devices are not
seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests.dist.launch import run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MICROBATCHES, WARM, STEADY = 4, 3, 3
SHRUNK = [
    "recipe=h200_small", "model.num_layers=5", "data.sequence_length=2048", "data.micro_batch_size=1",
    "data.max_bytes=4000000", f"run.microbatches={MICROBATCHES}", "run.steps=8",
]  # fmt: skip
CASES = {
    "alltoall": SHRUNK,
    "moonep": [*SHRUNK, "parallel.expert.dispatcher=moonep"],
    "muon": [*SHRUNK, "optim=muon", "offload.policy=recompute"],
}
MOE_LAYERS = 5
"""Four of five, and MTP's."""
ALLOWED = {
    ("k3train/train/step.py:run_batches", "tolist"),
    ("k3train/optim/clip.py:gradient_norm", "item"),
    ("k3train/train/balance.py:balance_experts", "tolist"),
}
BORDERS = "fla.ops.utils.index:_segmented_arange"
KINDS_OF_CHUNKS = 3
"""Of what flash-linear-attention cuts documents into: for KDA, for the convolution, asked for in two ways."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (answer,) = run_workers("tests.gpu.test_no_sync:steady_steps", 1, {"cases": CASES}, timeout=500)
    return answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_steady_step_waits_where_it_is_known_to(found: dict[str, Any], case: str, packed: bool) -> None:
    answer = found[f"{case} {'packed' if packed else 'whole'}"]
    assert answer["error"] is None, answer["error"]
    reads = {(place, what): count for place, what, count in answer["reads"]}
    assert reads == dict.fromkeys(ALLOWED, STEADY)
    # MoonEP's planner is timed besides, and read at the step's end.
    events = 2 if case == "moonep" else 1
    assert answer["events"] <= events * MOE_LAYERS * MICROBATCHES * STEADY
    most = KINDS_OF_CHUNKS * MICROBATCHES * STEADY if packed else 0
    assert answer["borders"] <= most, "once a micro-batch, whatever the number of layers"


def steady_steps(cases: dict[str, list[str]]) -> dict[str, Any]:
    """What each case read and waited for in its steady steps, or the synchronisation that stopped it."""
    from k3train.layout import layout_of
    from k3train.ops.packing import Packing
    from k3train.train.assemble import build_trainer, set_numerics
    from k3train.train.inputs import Inputs
    from k3train.train.step import train_step
    from launch.compose import compose, resolve_layout
    from parallel.groups import destroy, initialize

    answers: dict[str, Any] = {}
    for name, overrides in cases.items():
        config = resolve_layout(compose(overrides), 1)
        set_numerics(config)
        groups = initialize(layout_of(config), device="cuda", timeout_minutes=5, seed=1)
        inputs, trainer = Inputs(config, groups), build_trainer(config, groups)
        for way in ("whole", "packed"):
            steps = [inputs.next_step() for _ in range(WARM + STEADY)]
            if way == "whole":
                for batch in [batch for step in steps for batch in step]:
                    batch["packing"] = Packing.single(*batch["tokens"].shape, groups.device)
            for number, step in enumerate(steps[:WARM], start=1):
                train_step(trainer, step, number)
            torch.cuda.synchronize()
            answers[f"{name} {way}"] = _watched(trainer, steps[WARM:])
        inputs.close()
        destroy()
    return answers


def _watched(trainer: Any, steps: list[Any]) -> dict[str, Any]:
    from k3train.train.step import train_step
    from tests.unit.train.waits import reads

    error, counts = None, Counter[str]()
    with ExitStack() as stack:
        stack.enter_context(_counted(torch.cuda.Event, "synchronize", counts, "events"))
        _permit_borders(stack, counts)
        found = stack.enter_context(reads(_permitted, device="cuda"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number, step in enumerate(steps, start=WARM + 1):
                train_step(trainer, step, number)
        except RuntimeError as raised:
            error = _innermost(raised)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    read = [(*key, count) for key, count in sorted(found.items())]
    return {"error": error, "reads": read, "events": counts["events"], "borders": counts["borders"]}


@contextmanager
def _permitted(place: str) -> Iterator[None]:
    """Let the places that are allowed to read do so."""
    if place not in {each for each, _ in ALLOWED}:
        yield
        return
    with _without_check():
        yield


@contextmanager
def _without_check() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("error")


@contextmanager
def _counted(
    owner: Any, name: str, counts: Counter[str], key: str, *, permitted: bool = False
) -> Iterator[None]:
    own = getattr(owner, name)

    def counting(*args: Any, **keywords: Any) -> Any:
        counts[key] += 1
        if not permitted:
            return own(*args, **keywords)
        with _without_check():
            return own(*args, **keywords)

    setattr(owner, name, counting)
    try:
        yield
    finally:
        setattr(owner, name, own)


def _permit_borders(stack: ExitStack, counts: Counter[str]) -> None:
    import importlib

    module, _, function = BORDERS.partition(":")
    owner = importlib.import_module(module)
    stack.enter_context(_counted(owner, function, counts, "borders", permitted=True))


def _innermost(error: BaseException) -> str:
    """The message, and the functions of this repository that led to it."""
    import traceback

    frames = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return f"{error} ({', '.join(frames[-6:])})"

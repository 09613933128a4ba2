"""Finds what would make the host wait for a GPU, in a step that runs on a CPU: reads of tensors' values.

A read is a call of a tensor's method that gives numbers to Python, or an operation whose result's shape
depends on values. It is counted by its place, the innermost function outside torch itself. Not seen on a CPU:
copies between devices.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[3]
METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
SHAPED = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::bincount",
    "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::equal",
}  # fmt: skip
"""Operations whose result the host has to know something of."""
OWN = ("k3train", "parallel", "offload")
LIBRARIES = ("megatron/", "emerging_optimizers/", "torch/optim/")

Reads = Counter[tuple[str, str]]
"""By (place, what reads)."""


class _Operations(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        masks = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        counted = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        if name in SHAPED or masks or counted:
            self.note(name.removeprefix("aten::"))
        return func(*args, **kwargs)


def unchanged(place: str) -> AbstractContextManager[Any]:
    """Let a read at a place be as it is."""
    return nullcontext()


@contextmanager
def reads(
    let: Callable[[str], AbstractContextManager[Any]] = unchanged, *, device: str = "cpu"
) -> Iterator[Reads]:
    """What is read inside of tensors on a device; operations on a CPU and on this thread only.

    `let`: around each method's read, by its place.
    """
    found: Reads = Counter()
    depth = 0

    def note(what: str) -> None:
        if not depth:
            found[_place(), what] += 1

    def counting(name: str) -> Any:
        own = getattr(torch.Tensor, name)

        @wraps(own)
        def method(self: torch.Tensor, *args: Any, **keywords: Any) -> Any:
            nonlocal depth
            if self.device.type != device:
                return own(self, *args, **keywords)
            note(name.strip("_"))
            depth += 1
            try:
                with let(_place()):
                    return own(self, *args, **keywords)
            finally:
                depth -= 1

        return method

    inherited = [name for name in METHODS if name not in vars(torch.Tensor)]
    before = {name: getattr(torch.Tensor, name) for name in METHODS if name not in inherited}
    fresh = {name: counting(name) for name in METHODS}
    try:
        for name, method in fresh.items():
            setattr(torch.Tensor, name, method)
        with _Operations(note) if device == "cpu" else nullcontext():
            yield found
    finally:
        for name in inherited:
            delattr(torch.Tensor, name)
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for library in LIBRARIES:
            if f"site-packages/{library}" in file:
                return f"{file.partition('site-packages/')[2]}:{frame.f_code.co_name}"
        path = Path(file)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in (
            "k3train",
            "parallel",
            "offload",
        ):
            return f"{path.relative_to(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def _exchanges(found: Reads) -> Iterator[None]:
    """Count how often megatron-core's all-to-all asks for its sizes, for which the host waits on a GPU."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    own = Dispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        found["all-to-all", "sizes"] += 1
        return own(self, routing_map)

    with patch.object(Dispatcher, "preprocess", preprocess):
        yield


def of_a_step(cases: dict[str, list[str]]) -> dict[str, list[tuple[str, str, int]]]:
    """Reads of the second step of each configuration, on one rank of a CPU; batches are there already."""
    from k3train.layout import layout_of
    from k3train.train.assemble import build_trainer, set_numerics
    from k3train.train.inputs import Inputs
    from k3train.train.step import train_step
    from launch.compose import compose, resolve_layout
    from parallel.groups import destroy, initialize

    answers = {}
    for name, overrides in cases.items():
        config = resolve_layout(compose(overrides), 1)
        set_numerics(config)
        groups = initialize(layout_of(config), device="cpu", timeout_minutes=2, seed=1)
        inputs, trainer = Inputs(config, groups), build_trainer(config, groups)
        train_step(trainer, inputs.next_step(), 1)
        batches = inputs.next_step()
        with reads() as found, _exchanges(found):
            train_step(trainer, batches, 2)
        answers[name] = [(*key, count) for key, count in sorted(found.items())]
        inputs.close()
        destroy()
    return answers

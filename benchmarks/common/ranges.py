"""Names what a step does in a profiler's trace, for `attribution`: phases, parts of the model, operators.

Operators are the names that the model gives to its regions and sites (`offload.sites`), and those of what
surrounds it. Nothing of it is there outside `named_ranges`, and nothing that is computed changes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch.profiler import record_function

from offload import sites
from offload.sites import NOWHERE, Place

from .attribution import OPERATOR, PART, PHASE

_here = threading.local()


def phase(name: str, step: int) -> AbstractContextManager[Any]:
    """A phase of the trainer's step, by its hook."""
    return record_function(f"{PHASE}{name}")  # type: ignore[no-any-return]


@contextmanager
def named_ranges(trainer: Any) -> Iterator[None]:
    """Name all that the steps of a trainer do inside."""
    from k3train.shapes import layer_kinds
    from k3train.train import step

    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            for name, fresh in (("region", _region), ("site", _site)):
                if module is not sites and getattr(module, name, None) is getattr(sites, name):
                    stack.enter_context(_replaced(module, name, fresh))
        kinds = layer_kinds(trainer.config.model)
        for model in trainer.models:
            stack.enter_context(_wrapped(model, "forward", f"{OPERATOR}other"))
            if model.pre_process:
                stack.enter_context(_wrapped(model.embedding, "forward", f"{OPERATOR}embedding"))
            for index, layer in model.layers.items():
                stack.enter_context(_wrapped(layer, "forward", f"{PART}{'+'.join(kinds[int(index)])}"))
        for owner, attribute, name in (*_of_trainer(trainer), *_of_step(step), *_of_muon()):
            stack.enter_context(_wrapped(owner, attribute, f"{OPERATOR}{name}"))
        yield


def _of_trainer(trainer: Any) -> Iterator[tuple[Any, str, str]]:
    for module in trainer.modules:
        yield module, "zero_grad_buffer", "gradients.zero"
        for method in ("start_grad_sync", "finish_grad_sync", "scale_gradients"):
            yield module, method, "gradients.reduce"
    yield trainer.optimizer, "zero_grad", "gradients.zero"
    yield trainer.optimizer, "prepare_grads", "optimizer.prepare"
    if trainer.stream is not None:
        yield trainer.stream, "step", "optimizer.update"
    else:
        yield trainer.optimizer, "step_with_ready_grads", "optimizer.update"


def _of_step(step: Any) -> Iterator[tuple[Any, str, str]]:
    yield step, "_loss", "loss"
    yield step, "gradient_norm", "optimizer.norm"
    yield step, "clip_gradients", "optimizer.clip"
    yield step, "balance_experts", "balance"


def _of_muon() -> Iterator[tuple[Any, str, str]]:
    """Newton-Schulz as each optimizer calls it."""
    from k3train.optim import per_head

    yield per_head, "orthogonalize", "optimizer.newton_schulz"
    stock = sys.modules.get("megatron.core.optimizer.emerging_optimizers")
    if hasattr(stock, "newton_schulz_tp"):
        yield stock, "newton_schulz_tp", "optimizer.newton_schulz"


@contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    own = attribute in vars(owner)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)


def _wrapped(owner: Any, attribute: str, name: str) -> AbstractContextManager[None]:
    function = getattr(owner, attribute)

    @wraps(function)
    def named(*args: Any, **keywords: Any) -> Any:
        with record_function(name):
            return function(*args, **keywords)

    return _replaced(owner, attribute, named)


@contextmanager
def _at(place: Place) -> Iterator[None]:
    """Be at a place of the model, as the manager of activations would."""
    before = getattr(_here, "place", NOWHERE)
    _here.place = place
    try:
        with record_function(f"{OPERATOR}{place.site}"):
            yield
    finally:
        _here.place = before


def _region(name: str, function: Callable[..., Any], *inputs: Any, keep_results: bool = False) -> Any:
    """`sites.region`, named in its first run and in later ones."""
    place = getattr(_here, "place", NOWHERE).region(name)

    def named(*values: Any) -> Any:
        with _at(place):
            return function(*values)

    return sites.region(name, named, *inputs, keep_results=keep_results)


@contextmanager
def _site(name: str) -> Iterator[None]:
    """`sites.site`, named."""
    with sites.site(name), _at(getattr(_here, "place", NOWHERE).inner(name)):
        yield

"""Names of the places where a model saves tensors for its backward, given beside its code, not in it.

A model says `with site("kda.input"):` around what saves tensors, `region("kda.conv", function, *inputs)`
where a function may be run again instead of its results being kept, and `named("attn_res.bank", *rows)` of
tensors that many places save. Without a manager at work all are as good as absent.

A name without a dot, given by `site`, is a part of the model: names inside begin with it, as `mtp.kda.input`
does. Else the innermost name counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Keeper(Protocol):
    """What decides about tensors that are saved while it is active on this thread."""

    def within(self, name: str) -> AbstractContextManager[None]:
        """Tensors that are first saved inside belong to site `name`."""
        ...

    def region(
        self, name: str, function: Callable[..., Any], inputs: tuple[Any, ...], keep_results: bool
    ) -> Any:
        """function(*inputs), which may be run again in backward."""
        ...

    def named(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        """Whoever saves one of these first, it belongs to site `name`."""
        ...

    def milestone(self) -> Callable[[], None]:
        """To be called in backward: the regions around this point have been run again that far."""
        ...


@dataclass(frozen=True)
class Place:
    """Where in a model a tensor is saved."""

    part: str = ""
    name: str = ""

    @property
    def site(self) -> str:
        """The full name."""
        return ".".join(filter(None, (self.part, self.name))) or "other"

    def inner(self, name: str) -> Place:
        """Inside `site(name)`."""
        return Place(self.part, name) if "." in name else Place(Place(self.part, name).site)

    def region(self, name: str) -> Place:
        """Inside a region of this name."""
        return Place(self.part, name)


NOWHERE = Place()

_active = threading.local()


def keeper() -> Keeper | None:
    """The manager at work on this thread."""
    return getattr(_active, "keeper", None)


@contextmanager
def activated(manager: Keeper | None) -> Iterator[None]:
    """Let a manager, or none, see what this thread saves meanwhile."""
    before = keeper()
    _active.keeper = manager
    try:
        yield
    finally:
        _active.keeper = before


@contextmanager
def site(name: str) -> Iterator[None]:
    """Tensors that are first saved inside belong to this site, or this part of the model."""
    manager = keeper()
    if manager is None:
        yield
    else:
        with manager.within(name):
            yield


def named(name: str, *tensors: Tensor) -> None:
    """Let these tensors belong to site `name`, whoever saves them first."""
    manager = keeper()
    if manager is not None:
        manager.named(name, tensors)


def collective(x: Tensor) -> Tensor:
    """x, the result of a collective: where it lies in a region that is run again, all ranks run it again.

    Else a rank on which nothing that was saved is large enough to be given up would leave the others waiting.
    """
    manager = keeper()
    if manager is None or not x.requires_grad:
        return x
    result: Tensor = _Milestone.apply(x, manager.milestone())
    return result


class _Milestone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: Callable[[], None]) -> Tensor:
        ctx.reach = reach
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Unlike saved tensors, what a node has been given stays for as long as the node does.
        reach, ctx.reach = ctx.reach, None
        reach()
        return grads[0], None


def region[T](name: str, function: Callable[..., T], *inputs: Any, keep_results: bool = False) -> T:
    """function(*inputs), tensors and other values to a tensor or a tuple of tensors.

    What it saves, and what others save of its results, belongs to site `name`; under `recompute` only its
    inputs stay, and it is run again when backward needs any of that. It must compute the same again, bit for
    bit.

    Args:
        keep_results: results belong to those who save them, as where one region's result is the next one's
            input: else each would be made again through all before it.
    """
    manager = keeper()
    if manager is None:
        return function(*inputs)
    result: T = manager.region(name, function, inputs, keep_results)
    return result

"""What a model saves for its backward, site by site: hooks that count, and decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from offload import fp8
from offload.manager import ActivationManager
from offload.policy import Policy
from offload.sites import NOWHERE, Place, activated


class NoTier:
    """Everything stays on the device."""

    def put(self, tier: str, source: Tensor) -> None:
        return None

    def used(self) -> dict[str, int]:
        return {}


def manager(own: Iterable[Tensor], **rules: str) -> ActivationManager:
    """A manager on a CPU that takes every tensor but those of `own`, by rules of sites."""
    return ActivationManager(
        Policy.read(rules),
        NoTier(),
        parameters=own,
        device=torch.device("cpu"),
        codec=fp8,
        coded=torch.bfloat16,
        window=1 << 20,
        smallest=0,
    )


def backward(loss: Callable[[], Tensor], keeper: ActivationManager | None) -> None:
    """Compute a loss and its gradients, with a manager at work or none."""
    if keeper is None:
        loss().backward()
        return
    with keeper.forward("micro-batch"):
        value = loss()
    with keeper.backward("micro-batch"):
        value.backward()


class Held:
    """A storage that somebody keeps for backward."""

    def __init__(self, unit: str, site: str, tensor: Tensor) -> None:
        self.unit, self.site, self.tensor = unit, site, tensor
        self.nbytes = tensor.untyped_storage().nbytes()


class Recorder:
    """A keeper that counts every storage once, under the site where it is saved first."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        """`own`: parameters and buffers, which do not count."""
        self.unit = ""
        """What `counted` tells apart beside sites."""
        self._place = NOWHERE
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._held: WeakValueDictionary[int, Held] = WeakValueDictionary()
        self._names: dict[int, str] = {}
        self._named: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count what is saved inside."""
        hooks = torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda held: getattr(held, "tensor", held)
        )
        with activated(self), hooks:
            yield

    def counted(self) -> dict[str, dict[str, int]]:
        """Bytes that are still held, by unit and site."""
        found: dict[str, dict[str, int]] = {}
        for held in self._held.values():
            sites = found.setdefault(held.unit, {})
            sites[held.site] = sites.get(held.site, 0) + held.nbytes
        return found

    def within(self, name: str) -> AbstractContextManager[None]:
        """See `offload.sites.Keeper`."""
        return self._at(self._place.inner(name))

    def region(
        self, name: str, function: Callable[..., Any], inputs: tuple[Any, ...], keep_results: bool
    ) -> Any:
        """See `offload.sites.Keeper`."""
        with self._at(self._place.region(name)):
            return function(*inputs)

    def named(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        """See `offload.sites.Keeper`."""
        self._named += tensors
        for tensor in tensors:
            self._names.setdefault(tensor.untyped_storage().data_ptr(), self._place.region(name).site)

    def milestone(self) -> Callable[[], None]:
        """See `offload.sites.Keeper`: nothing runs again."""
        return lambda: None

    @contextmanager
    def _at(self, place: Place) -> Iterator[None]:
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def _pack(self, tensor: Tensor) -> Any:
        place = tensor.untyped_storage().data_ptr()
        if place in self._own:
            return tensor
        held = self._held.get(place)
        if held is None:
            # Without its history: a result would hold the node that saves it.
            held = Held(self.unit, self._names.get(place, self._place.site), tensor.detach())
            self._held[place] = held
        return held

"""Functions that are run again in backward instead of what they saved being kept.

The graph of the first run is the one that backward walks, so that gradients add up in the order that they
would have without: what it saved are numbers, and when one is asked for, the function is run again from its
inputs and what is saved then, in the same order, takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from .entry import Part, whole
from .random_state import RandomState, replayed
from .sites import Place

if TYPE_CHECKING:
    from .manager import ActivationManager


NOTHING = torch.empty(0)
"""What a milestone saves."""


class Kept(Protocol):
    """What the hooks keep in place of a tensor."""

    def unpack(self) -> Tensor:
        """The tensor again."""
        ...


class Region:
    """One call of a function under `recompute`."""

    def __init__(
        self, manager: ActivationManager, place: Place, function: Callable[..., Any], inputs: tuple[Any, ...]
    ) -> None:
        self._place, self._manager, self._function = place, manager, function
        self._inputs = [_Input(manager, value) if isinstance(value, Tensor) else value for value in inputs]
        self._handles: list[ref[RegionHandle]] = []
        self._results: list[ref[ResultHandle]] = []
        self._saved: dict[int, Tensor] = {}
        self._outputs: list[Tensor] | None = None
        self._random: RandomState | None = None
        self._to_the_end = False

    def first_run(self, inputs: tuple[Any, ...]) -> Any:
        """The function's result; nothing that it saves stays."""
        state = RandomState.now() if self._manager.has_randomness else None
        with self._manager.packing(_Recorder(self)):
            result = self._function(*inputs)
        if state is not None and not state.equals(RandomState.now()):
            self._random = state
        return result

    def record(self) -> RegionHandle:
        """A handle in place of the next tensor that the function saves."""
        handle = RegionHandle(self, len(self._handles))
        self._handles.append(ref(handle))
        return handle

    def result(self, index: int, tensor: Tensor) -> ResultHandle:
        """A handle in place of a tensor over the memory of the function's result `index`."""
        handle = ResultHandle(self, index, tensor)
        self._results.append(ref(handle))
        return handle

    def saved(self, index: int) -> Tensor:
        """What the function saved as its tensor `index`."""
        if index not in self._saved:
            self._run_again()
        return self._saved.pop(index)

    def output(self, index: int) -> Tensor:
        """The function's result `index`; it stays until all handles of results are gone."""
        if self._outputs is None:
            self._run_again(results=True)
        assert self._outputs is not None
        outputs = self._outputs
        if not self._results_wanted():
            self._outputs = None
        return outputs[index]

    def capture(self, index: int, tensor: Tensor) -> None:
        """Take what the function saves as its tensor `index`, if anybody will ask for it."""
        if index >= len(self._handles):
            raise AssertionError(f"{self._place.site} saved more tensors when it was run again")
        handle = self._handles[index]()
        if handle is not None and not handle.is_used:
            self._saved[index] = tensor
        if index + 1 == len(self._handles) and not self._to_the_end:
            raise _Enough

    def _results_wanted(self) -> bool:
        return any(handle is not None and not handle.is_used for handle in map(_call, self._results))

    def _run_again(self, *, results: bool = False) -> None:
        self._saved.clear()
        self._to_the_end = results or (self._outputs is None and self._results_wanted())
        inputs = [value.again() if isinstance(value, _Input) else value for value in self._inputs]
        capture = _Capture(self)
        try:
            with self._in_forward(capture):
                result = self._function(*inputs)
        except _Enough:
            return
        if capture.count != len(self._handles):
            first, again = len(self._handles), capture.count
            raise AssertionError(
                f"{self._place.site} saved {first} tensors, and {again} when it was run again"
            )
        if self._to_the_end:
            self._outputs = [tensor.detach() for tensor in tensors_of(result)]

    @contextmanager
    def _in_forward(self, capture: _Capture) -> Iterator[None]:
        manager = self._manager
        with torch.enable_grad(), manager.at(self._place), manager.hooks(capture), replayed(self._random):
            yield


class _Input:
    """An argument of a region, stored as its site's policy says."""

    def __init__(self, manager: ActivationManager, tensor: Tensor) -> None:
        self._requires_grad = tensor.requires_grad
        self._kept: Any = manager.pack(tensor.detach())

    def again(self) -> Tensor:
        kept = self._kept
        tensor: Tensor = kept if isinstance(kept, Tensor) else kept.unpack()
        return tensor.detach().requires_grad_(self._requires_grad)


class RegionHandle:
    """A tensor that a region saved."""

    __slots__ = ("__weakref__", "_index", "_region", "is_used")

    def __init__(self, region: Region, index: int) -> None:
        self._region, self._index, self.is_used = region, index, False

    def unpack(self) -> Tensor:
        """See `Kept`."""
        tensor = self._region.saved(self._index)
        self.is_used = True
        return tensor


class ResultHandle:
    """A tensor over the memory of a region's result, saved by somebody else."""

    __slots__ = ("__weakref__", "_index", "_part", "_region", "is_used")

    def __init__(self, region: Region, index: int, tensor: Tensor) -> None:
        self._region, self._index, self._part, self.is_used = region, index, Part.of(tensor), False

    def unpack(self) -> Tensor:
        """See `Kept`."""
        self.is_used = True
        return self._part.over(whole(self._region.output(self._index)))


class _Recorder:
    """Packs what a region saves in its first run."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def pack(self, tensor: Tensor) -> RegionHandle:
        return self._region.record()

    def milestone(self) -> RegionHandle:
        return self._region.record()


class _Capture:
    """Packs what a region saves when it is run again."""

    def __init__(self, region: Region) -> None:
        self._region, self.count = region, 0

    def pack(self, tensor: Tensor) -> None:
        index, self.count = self.count, self.count + 1
        self._region.capture(index, tensor)

    def milestone(self) -> None:
        self.pack(NOTHING)


class _Enough(Exception):
    """Everything that is needed has been captured."""


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a function's result, a tensor or a tuple."""
    values = result if isinstance(result, tuple) else (result,)
    return [value for value in values if isinstance(value, Tensor)]


def _call[T](reference: ref[T]) -> T | None:
    return reference()

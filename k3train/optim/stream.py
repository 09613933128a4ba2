"""The AdamW update window by window, where gradients or states are not all in device memory.

A gradient window is a set of shards that fit into one of ZeRO-2's two slots, which are idle by then; it is
cut into state windows, whose master weights and moments pass through two device buffers. Two passes over the
gradients: one for the global norm, one for the update; a window that is still in its slot is not read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.shelf import Shelf
from parallel.zero2 import SLOTS
from parallel.zero2.rotator import Rotator
from parallel.zero2.store import Key

from .windows import Held, StateWindow, StateWindows


class Owned(NamedTuple):
    """A parameter of which this rank updates a part."""

    wrapper: Any
    """megatron-core's DistributedOptimizer."""
    model: nn.Parameter
    main: Tensor
    """FP32, one-dimensional: the part that is updated."""

    @property
    def held(self) -> Held:
        """What a state window keeps of it."""
        return Held(self.wrapper.optimizer, self.main, has_master=self.model.dtype != self.main.dtype)


@dataclass(eq=False)
class GradientWindow:
    """Shards whose gradients are on the device together."""

    owned: list[Owned] = field(default_factory=list)
    shards: dict[Key, int] = field(default_factory=dict)
    """Shard -> where it begins in the slot. Empty for what is resident."""
    states: list[StateWindow] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    """Of the parameters, FP32; empty while they are not on the device."""


class StreamedUpdate:
    """Takes the place of the optimizer's own step."""

    def __init__(
        self,
        wrappers: Sequence[Any],
        *,
        rotator: Rotator | None,
        shelf: Shelf | None,
        window_bytes: int,
        device: torch.device,
    ) -> None:
        """Cut the windows; states move to the shelf at once.

        Args:
            wrappers: the ShardedOptimizers.
            rotator: of chunks whose gradient shards must be fetched; None where all are resident.
            shelf: keeps states and master weights; None where they are resident.
            window_bytes: of each of the two device buffers that states pass through.
        """
        self.wrappers = [wrapper for wrapper in wrappers if not wrapper.is_stub_optimizer]
        for wrapper in self.wrappers:
            wrapper.is_streamed = True
        self.rotator = rotator
        self.windows = self._cut()
        self.states: StateWindows | None = None
        if shelf is not None:
            self.states = StateWindows(shelf, window_bytes, device)
            for window in self.windows:
                window.states = self.states.cut([each.held for each in window.owned])
            self.states.fill()

    def prepare(self) -> None:
        """A step's gradients are complete: forget those of the step before."""
        for window in self.windows:
            window.gradients = []

    def gradients(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """(gradient of this rank's part, parameter) of each window in turn, there until the next one."""
        for window in self._load_each():
            models = [each.model for each in window.owned]
            yield list(zip(window.gradients, models, strict=True))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all gradients, those too that are not on the device now."""
        for window in self.windows:
            if window.shards:
                assert self.rotator is not None
                self.rotator.store.scale(window.shards, factor)
            if window.gradients:
                torch._foreach_mul_(window.gradients, factor)

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters, then gather them, as megatron-core's step does."""
        counters = _Counters(self.wrappers)
        for window in self._load_each():
            gradients = {
                id(each.main): (each, gradient)
                for each, gradient in zip(window.owned, window.gradients, strict=True)
            }
            if self.states is None:
                self._update(list(gradients.values()), counters)
                continue
            for state in self.states.stream(window.states):
                self._update([gradients[id(main)] for main in state.mains], counters)
        counters.advance()
        # Every wrapper knows all chunks, and each chunk's parameters are gathered once.
        self.wrappers[0].start_param_sync_for_bucket_group_subset()

    def _cut(self) -> list[GradientWindow]:
        """What is resident first, then windows of whole shards, as many as fit into a slot."""
        resident = GradientWindow()
        by_key: defaultdict[Key, list[Owned]] = defaultdict(list)
        for wrapper in self.wrappers:
            for model, main in wrapper.parameter_shards():
                piece = self.rotator.piece(model) if self.rotator else None
                owned = Owned(wrapper, model, main)
                (by_key[piece.key] if piece else resident.owned).append(owned)
        windows = [resident] if resident.owned else []
        free = 0
        for shard in self.rotator.shards.values() if self.rotator else ():
            if shard.numel > free or not windows[-1].shards:
                windows.append(GradientWindow())
                free = self.rotator.largest  # type: ignore[union-attr]
            windows[-1].shards[shard.key] = self.rotator.largest - free  # type: ignore[union-attr]
            windows[-1].owned += by_key[shard.key]
            free -= shard.numel
        return windows

    def _load_each(self) -> Iterator[GradientWindow]:
        fetched = [window for window in self.windows if window.shards]
        for window in self.windows:
            if not window.shards:
                window.gradients = [each.wrapper.gradient(each.model) for each in window.owned]
            else:
                index = fetched.index(window)
                self._load(window, index % SLOTS, fetched[index + 1 : index + 2])
            yield window

    def _load(self, window: GradientWindow, slot: int, following: list[GradientWindow]) -> None:
        """Fetch a window's gradients into a slot, unless they are there, and begin to read the next ones."""
        if window.gradients:
            return
        assert self.rotator is not None
        memory = self.rotator.borrow(slot + 1)[slot]
        for other in self.windows:
            if other.gradients and other.shards and other.gradients[0].data_ptr() in _span(memory):
                other.gradients = []
        for key, start in window.shards.items():
            self.rotator.store.fetch(key, memory[start : start + self.rotator.shards[key].numel])
        for key in (key for other in following if not other.gradients for key in other.shards):
            self.rotator.store.request(key)
        for each in window.owned:
            piece = self.rotator.piece(each.model)
            assert piece is not None
            start = window.shards[piece.key]
            window.gradients.append(memory[start + piece.start : start + piece.end])

    def _update(self, owned: list[tuple[Owned, Tensor]], counters: _Counters) -> None:
        """Run the inner optimizers on some of their parameters, and write master weights to the model."""
        for wrapper in self.wrappers:
            own = [pair for pair in owned if pair[0].wrapper is wrapper]
            if not own:
                continue
            for each, gradient in own:
                each.main.grad = gradient
            counters.rewind(wrapper)
            with _only(wrapper.optimizer, {id(each.main) for each, _ in own}):
                wrapper.optimizer.step()
            for each, _ in own:
                each.main.grad = None
                wrapper.write_back(each.model, each.main)


class _Counters:
    """Step counts that a fused AdamW keeps for a group, which advance once and not for each window."""

    def __init__(self, wrappers: Sequence[Any]) -> None:
        self._before = [
            (wrapper, group, _copied(group.get("step")))
            for wrapper in wrappers
            if not isinstance(wrapper.optimizer, torch.optim.Adam | torch.optim.AdamW)
            for group in wrapper.optimizer.param_groups
        ]

    def rewind(self, wrapper: Any) -> None:
        """Before a window's update."""
        for owner, group, step in self._before:
            if owner is wrapper and step is not None:
                group["step"] = _copied(step)
            elif owner is wrapper:
                group.pop("step", None)

    def advance(self) -> None:
        """After the last window."""
        for _, group, step in self._before:
            group["step"] = 1 if step is None else step + 1


def _copied(step: Any) -> Any:
    return step.clone() if isinstance(step, Tensor) else step


def _span(memory: Tensor) -> range:
    return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)


@contextmanager
def _only(inner: torch.optim.Optimizer, mains: set[int]) -> Iterator[None]:
    """Hide all other parameters from an optimizer."""
    whole = [group["params"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["params"] = [main for main in group["params"] if id(main) in mains]
    try:
        yield
    finally:
        for group, params in zip(inner.param_groups, whole, strict=True):
            group["params"] = params

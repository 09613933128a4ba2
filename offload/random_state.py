"""The state of random generators in front of a function, where the function draws from one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Of torch's default generators and of megatron-core's tracker, where it is in use."""

    cpu: Tensor
    cuda: Tensor | None
    tracked: dict[str, Any]

    @staticmethod
    def now() -> RandomState:
        """The present state."""
        cuda = torch.cuda.is_initialized()
        tracked = {} if (tracker := _tracker()) is None else tracker().get_states()
        return RandomState(torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None, dict(tracked))

    def apply(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        if (tracker := _tracker()) is not None:
            tracker().set_states(dict(self.tracked))

    def equals(self, other: RandomState) -> bool:
        """Whether nothing was drawn in between."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        if (self.cuda is None) != (other.cuda is None):
            return False
        if self.cuda is not None and other.cuda is not None and not torch.equal(self.cuda, other.cuda):
            return False
        # A draw of the tracker leaves a new object.
        return self.tracked.keys() == other.tracked.keys() and all(
            self.tracked[name] is other.tracked[name] for name in self.tracked
        )


@contextmanager
def replayed(state: RandomState | None) -> Iterator[None]:
    """Draw what was drawn behind `state`, then go on as if nothing had been drawn; None: nothing is."""
    if state is None:
        yield
        return
    present = RandomState.now()
    state.apply()
    try:
        yield
    finally:
        present.apply()


def _tracker() -> Callable[[], Any] | None:
    """megatron-core's, if anything has loaded it: without it nothing can have been drawn from it."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if module is None else module.get_cuda_rng_tracker

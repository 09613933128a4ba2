"""Who computes what: policies from counts to an allocation. Letters: R ranks, E experts, P = E/R.

`fill` is MoonEP's; the others are there to be compared with it. A policy sees the same counts on every rank
and must answer the same there.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .backends import Backend
from .types import stay


class Policy(Protocol):
    """From counts to an allocation."""

    name: str
    balanced: bool
    """Every rank gets its share of the rows, give or take one: the size of its buffer is known before."""

    def __call__(self, counts: Tensor, backend: Backend) -> Tensor:
        """counts [R, E] of source ranks to alloc [R, E] of destination ranks, int32."""

    def observe(self, counts: Tensor) -> None:
        """Learn from the counts [R, E] of a step behind it; called once a step on every rank."""


class Fill:
    """Equal rows on every rank, whatever the counts are."""

    name, balanced = "fill", True

    def __call__(self, counts: Tensor, backend: Backend) -> Tensor:
        return backend.fill(counts)

    def observe(self, counts: Tensor) -> None:
        """Nothing to learn."""


class Stay:
    """Every row at the home of its expert: plain expert parallelism."""

    name, balanced = "none", False

    def __call__(self, counts: Tensor, backend: Backend) -> Tensor:
        return stay(counts.sum(0, dtype=torch.int32), counts.shape[0])

    def observe(self, counts: Tensor) -> None:
        """Nothing to learn."""


FILL, NONE = Fill(), Stay()

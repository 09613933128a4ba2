"""Which implementation of the planner runs, and why another one does not."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from .types import Tables


class BackendError(ValueError):
    """A planner was asked for that does not exist or cannot run here."""


class Backend(Protocol):
    """What the module of a backend offers. All results are equal to the reference's, value by value."""

    def fill(self, counts: Tensor) -> Tensor:
        """counts [R, E] to alloc [R, E], both int32: the balanced allocation."""

    def lay_out(
        self, alloc: Tensor, counts: Tensor, choice: Tensor, rank: int, pad: int, stride: int
    ) -> tuple[Tables, Tensor, Tensor]:
        """The tables of an allocation; rows int64 and first bool [S * K] of this rank's choice [S, K]."""


@dataclass(frozen=True)
class _Entry:
    name: str
    module: str
    device_types: tuple[str, ...] = ("cpu", "cuda")
    most: tuple[int, int, int] | None = None
    """Largest R, P and K that it takes; None for any."""
    requires: str | None = None
    """Module that has to import, beyond torch."""

    def refuses(self, device_type: str, ranks: int, places: int, top_k: int) -> str | None:
        """Why it cannot plan this, or None."""
        if device_type not in self.device_types:
            return f"runs on {' and '.join(self.device_types)} tensors, not {device_type}"
        for letter, value, most in zip("RPK", (ranks, places, top_k), self.most or (), strict=False):
            if value > most:
                return f"takes at most {letter}={most}, not {value}"
        if self.requires and importlib.util.find_spec(self.requires) is None:
            return f"{self.requires} is not installed"
        return None


# Fastest first: `auto` takes the first one that does not refuse.
_ENTRIES = (
    _Entry("triton", "triton", ("cuda",), (128, 2048, 64), "triton"),
    _Entry("torch", "vectorised"),
    _Entry("reference", "plain"),
)
NAMES = tuple(entry.name for entry in _ENTRIES)


@cache
def resolve(requested: str, device_type: str, ranks: int, places: int, top_k: int) -> Backend:
    """The backend that plans for R ranks of P experts on tensors of `device_type`, K experts a token.

    Raises:
        BackendError: `requested` is unknown or cannot run here; "auto" takes the fastest that can.
    """
    reasons = {entry: entry.refuses(device_type, ranks, places, top_k) for entry in _ENTRIES}
    usable = [entry for entry, reason in reasons.items() if reason is None]
    if requested == "auto":
        return _load(usable[0])
    for entry, reason in reasons.items():
        if entry.name == requested:
            if reason:
                names = ", ".join(entry.name for entry in usable)
                raise BackendError(f"planner {requested}: {reason}; use auto or {names}")
            return _load(entry)
    raise BackendError(f"planner {requested}: no such backend; use auto, {', '.join(NAMES)}")


def report() -> list[tuple[str, bool, str | None]]:
    """(backend, can run in this process, why not) for every backend, fastest first."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    reasons = [(entry.name, entry.refuses(device_type, 1, 1, 1)) for entry in _ENTRIES]
    return [(name, reason is None, reason) for name, reason in reasons]


def _load(entry: _Entry) -> Backend:
    return cast(Backend, importlib.import_module(f".{entry.module}", __package__))

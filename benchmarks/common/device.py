"""Waiting for the device, and giving a model's memory back, where there is one."""

from __future__ import annotations

from typing import Any


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def dismantle(chunks: list[Any]) -> None:
    """Break the circle of wrapper, gradient hooks and the last step's graph, which gc cannot see."""
    for chunk in chunks:
        vars(chunk).clear()

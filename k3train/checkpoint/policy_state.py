"""What MoonEP's policies have learned: checkpoints of another dispatcher or policy have nothing of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .tensors import CheckpointTensors

MARK = ".policy_"

Missing = dict[str, dict[str, Tensor]]
"""By chunk and name: what a policy begins with."""


def leave_out(state: dict[str, Any], saved: CheckpointTensors) -> Missing:
    """Take what `saved` lacks out of a sharded state, so that the policy goes on from what it has now."""
    missing: Missing = {}
    for part, entries in state.items():
        absent = [name for name, entry in entries.items() if MARK in name and not saved.has_key(entry.key)]
        if absent and part != "optimizer":
            missing[part] = {name: entries.pop(name).data for name in absent}
    return missing


def put_back(loaded: dict[str, Any], missing: Missing) -> None:
    """Make a loaded state whole again."""
    for part, entries in missing.items():
        loaded[part].update(entries)

"""Loads only the model of a checkpoint, without touching the folder: its run may still be going on."""

from __future__ import annotations

from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.transformer.module import MegatronModule

from ..errors import UserError
from . import folders
from .verify import verify


def load_weights(root: Path, model: MegatronModule) -> int:
    """Fill a model from the newest intact checkpoint under `root`, whatever layout saved it; its step.

    Raises:
        UserError: there is no complete checkpoint, or none is intact.
    """
    steps = folders.available(root)
    if not steps:
        raise UserError(f"{root} holds no complete checkpoint; let the run reach checkpoint.every or its end")
    for step in reversed(steps):
        folder = folders.complete(root, step)
        if not verify(folder):
            state = model.sharded_state_dict(prefix="model.")
            loaded = dist_checkpointing.load(state, str(folder))
            model.load_state_dict({name.removeprefix("model."): value for name, value in loaded.items()})
            return step
    raise UserError(f"none of the {len(steps)} checkpoints in {root} is intact")

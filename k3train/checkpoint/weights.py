"""The model's weights alone into any layout; their source is not touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ..errors import UserError
from ..model.decoder import LanguageModelChunk
from ..model.naming import named_parameters
from ..vision_shapes import PREFIX
from . import folders
from .sources import Tensors
from .tensors import CheckpointTensors
from .verify import verify

MAY_BE_ABSENT = ("mtp.", f"{PREFIX}.")
"""Parts of a model that keep their initial values when the weights have none for them."""


@torch.no_grad()
def fill(models: Iterable[MegatronModule], source: Tensors) -> set[str]:
    """Copy into bare chunks, and a tower, what each holds; parts that the source has nothing for.

    Each rank reads its own tensors only; not a collective.

    Raises:
        UserError: a tensor is missing, damaged or of another shape.
    """
    absent = set()
    for model in models:
        for name, tensor in _named_tensors(model):
            part = next((part for part in MAY_BE_ABSENT if name.startswith(part)), None)
            if part and name not in source:
                absent.add(part.removesuffix("."))
                continue
            if source.shape(name) != tuple(tensor.shape):
                raise UserError(
                    f"{name} has the shape {list(source.shape(name))} in the weights to start from and "
                    f"{list(tensor.shape)} in the model"
                )
            tensor.copy_(source.read(name))
    return absent


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
            fill([model], CheckpointTensors(folder))
            return step
    raise UserError(f"none of the {len(steps)} checkpoints in {root} is intact")


def _named_tensors(model: MegatronModule) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their global names, and the bias of every router."""
    if not isinstance(model, LanguageModelChunk):
        yield from model.named_parameters()
        return
    yield from named_parameters(model)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias"))

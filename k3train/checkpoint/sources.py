"""Weights by their global names, out of a run or a Hugging Face folder; touches neither."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from . import folders
from .huggingface.config import FILE
from .huggingface.reader import HuggingFaceTensors
from .tensors import CheckpointTensors
from .verify import newest


class Tensors(Protocol):
    """Tensors by their global names."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor, on the host, in its own dtype."""
        ...


def open_weights(path: Path) -> Tensors:
    """The weights of a Hugging Face folder, or of a run's newest complete checkpoint.

    Raises:
        UserError: it is neither, or damaged.
    """
    if (path / FILE).is_file():
        return HuggingFaceTensors(path)
    root = path / "checkpoints"
    return CheckpointTensors(folders.complete(root, newest(root)))

"""Initial weights of the vision tower and its projector, drawn by name as `init` draws the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..vision_shapes import PREFIX
from .seeds import named_generator
from .vision import VisionModel


@torch.no_grad()
def initialize_vision(vision: VisionModel, seed: int, init_std: float) -> None:
    """Fill every parameter in place; which rank holds the tower, and beside what, changes no weight."""
    for name, parameter in vision.named_parameters():
        if parameter.is_meta:  # a rehearsal
            continue
        path = f"{PREFIX}.{name}"
        generator = named_generator(path, seed, parameter.device)
        parameter.copy_(initial_vision(path, parameter, init_std, generator))


def initial_vision(name: str, parameter: Tensor, init_std: float, generator: torch.Generator) -> Tensor:
    """Value of the parameter with the global name `name`.

    Norms are one. Linears of the projector and of the blocks' MLPs are truncated normal of standard deviation
    sqrt(2 / inputs), cut at 2 as the released code does, which is many standard deviations out. All others,
    the grid of positions included, are normal of standard deviation `init_std`.
    """
    if parameter.dim() == 1:
        return torch.ones_like(parameter)
    value = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    if name.startswith(f"{PREFIX}.projector.") or ".mlp." in name:
        std = math.sqrt(2 / parameter.shape[1])
        return torch.nn.init.trunc_normal_(value, std=std, a=-2.0, b=2.0, generator=generator)
    return value.normal_(0.0, init_std, generator=generator)

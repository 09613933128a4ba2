"""Initial weights, drawn parameter by parameter from a seed and the parameter's global name.

No layout changes a weight: a model cut over any number of ranks starts as the same model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import ModelConfig
from .decoder import LanguageModelChunk
from .naming import named_parameters
from .seeds import named_generator

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4


@torch.no_grad()
def initialize(chunk: LanguageModelChunk, seed: int) -> None:
    """Fill every parameter of a chunk in place; the same on every kind of CPU, and on every kind of GPU."""
    for name, parameter in named_parameters(chunk):
        if parameter.is_meta:  # a rehearsal
            continue
        generator = named_generator(name, seed, parameter.device)
        parameter.copy_(_initial(name, parameter, chunk.config.k3, generator))


def _initial(name: str, parameter: Tensor, model: ModelConfig, generator: torch.Generator) -> Tensor:
    """Value of one parameter. Norms are one, AttnRes queries and A_log zero, matrices normal."""
    kind = name.rsplit(".", 1)[-1]
    if kind in ("query", "A_log"):
        return torch.zeros_like(parameter)
    if kind == "norm_weight" or name.endswith("norm.weight"):
        return torch.ones_like(parameter)
    value = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    if kind == "dt_bias":
        return inverse_softplus_bias(value.uniform_(generator=generator))
    if kind.endswith("_conv"):
        bound = 1 / math.sqrt(model.short_conv_kernel_size)
        return value.uniform_(-bound, bound, generator=generator)
    return value.normal_(0.0, model.init_std, generator=generator)


def inverse_softplus_bias(uniform: Tensor) -> Tensor:
    """dt_bias from uniform numbers: softplus of it is log-uniform between DT_MIN and DT_MAX.

    Source: Mamba-2's rule, which the K3 report follows.
    """
    dt = torch.exp(uniform * (math.log(DT_MAX) - math.log(DT_MIN)) + math.log(DT_MIN)).clamp(min=DT_FLOOR)
    return dt + torch.log(-torch.expm1(-dt))

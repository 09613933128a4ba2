"""Bias-free projections built from megatron-core's parallel linears, local or Transformer Engine's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .transformer_config import K3TransformerConfig


def column_linear(
    cls: type,
    config: K3TransformerConfig,
    inputs: int,
    outputs: int,
    group: torch.distributed.ProcessGroup,
) -> nn.Module:
    """A projection whose weight [outputs, inputs] would be cut along `outputs` under tensor parallelism."""
    return cls(
        inputs,
        outputs,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=group,
    )


def row_linear(
    cls: type,
    config: K3TransformerConfig,
    inputs: int,
    outputs: int,
    group: torch.distributed.ProcessGroup,
) -> nn.Module:
    """A projection whose weight [outputs, inputs] would be cut along `inputs` under tensor parallelism."""
    return cls(
        inputs,
        outputs,
        config=config,
        init_method=config.init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
        is_expert=False,
        tp_group=group,
    )


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """Apply a megatron-core linear, which returns its output and an unused bias."""
    return linear(x)[0]

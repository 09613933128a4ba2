"""Bias-free projections built from megatron-core's parallel linears, local or Transformer Engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

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


def project(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a megatron-core linear, which returns its output and an unused bias."""
    return module(x)[0]


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [t, i] by weight [o, i] in FP32: [t, o]. Keeps neither's FP32 copy for backward."""
    output: Tensor = _LinearFP32.apply(x, weight)
    return output


class _LinearFP32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x, grad_weight = grad.mm(weight.float()), grad.t().mm(x.float())
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)

"""SiTU-GLU that keeps its input only and works its factors out again in backward.

Letters: f half the width of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference


def situ_glu(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See `ops.situ.situ_glu`."""
    output: Tensor = _SituGLU.apply(gate_up, beta, linear_beta)
    return output


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.beta, ctx.linear_beta = beta, linear_beta
        return reference.situ_glu(gate_up, beta, linear_beta)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)  # [..., f]
        grad = grads[0].to(gate.dtype)
        tanh_gate, tanh_up = torch.tanh(gate / ctx.beta), torch.tanh(up / ctx.linear_beta)
        sigmoid = torch.sigmoid(gate)
        bent = ctx.beta * tanh_gate * sigmoid
        slope = (1 - tanh_gate.square()) * sigmoid + bent * (1 - sigmoid)
        grad_gate = grad * slope * (ctx.linear_beta * tanh_up)
        grad_up = grad * bent * (1 - tanh_up.square())
        return torch.cat((grad_gate, grad_up), dim=-1).to(gate_up.dtype), None, None

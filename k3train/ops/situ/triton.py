"""SiTU-GLU in one Triton kernel each way; keeps its input only. Letters: f half the width of the input."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def situ_glu(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See `ops.situ.situ_glu`."""
    output: Tensor = _SituGLU.apply(gate_up, beta, linear_beta)
    return output


@triton.jit
def _factors(gate, up, beta, linear_beta):  # type: ignore[no-untyped-def]
    # tanh(x) = 2 sigmoid(2x) - 1 keeps to functions that every Triton version has, and saturates cleanly
    tanh_gate = 2 * tl.sigmoid(2 * gate / beta) - 1
    tanh_up = 2 * tl.sigmoid(2 * up / linear_beta) - 1
    return tanh_gate, tl.sigmoid(gate), tanh_up


@triton.jit
def _forward_kernel(gate_up, output, f, beta, linear_beta, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    gate = tl.load(gate_up + row * 2 * f + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + column, mask=inside, other=0.0).to(tl.float32)
    tanh_gate, sigmoid, tanh_up = _factors(gate, up, beta, linear_beta)
    result = beta * tanh_gate * sigmoid * linear_beta * tanh_up
    tl.store(output + row * f + column, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    gate_up, grad_output, grad_gate_up, f, beta, linear_beta, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    gate = tl.load(gate_up + row * 2 * f + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_output + row * f + column, mask=inside, other=0.0).to(tl.float32)
    tanh_gate, sigmoid, tanh_up = _factors(gate, up, beta, linear_beta)
    bent = beta * tanh_gate * sigmoid
    slope = (1 - tanh_gate * tanh_gate) * sigmoid + bent * (1 - sigmoid)
    grad_gate = grad * slope * linear_beta * tanh_up
    grad_up = grad * bent * (1 - tanh_up * tanh_up)
    element = grad_gate_up.dtype.element_ty
    tl.store(grad_gate_up + row * 2 * f + column, grad_gate.to(element), mask=inside)
    tl.store(grad_gate_up + row * 2 * f + f + column, grad_up.to(element), mask=inside)


def _grid(gate_up: Tensor) -> tuple[int, int]:
    f = gate_up.shape[-1] // 2
    return gate_up.numel() // (2 * f), triton.cdiv(f, BLOCK)


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.beta, ctx.linear_beta = beta, linear_beta
        f = gate_up.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], f)
        if output.numel():
            _forward_kernel[_grid(gate_up)](gate_up, output, f, beta, linear_beta, BLOCK=BLOCK)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        if gate_up.numel():
            f = gate_up.shape[-1] // 2
            grad_output = grads[0].contiguous()
            _backward_kernel[_grid(gate_up)](
                gate_up, grad_output, grad_gate_up, f, ctx.beta, ctx.linear_beta, BLOCK=BLOCK
            )
        return grad_gate_up, None, None

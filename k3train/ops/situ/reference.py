"""SiTU-GLU by autograd. Letters: f half the width of the input."""

from __future__ import annotations

import torch
from torch import Tensor


def situ_glu(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See `ops.situ.situ_glu`."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)  # [..., f]
    activated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return (activated * linear_beta * torch.tanh(up / linear_beta)).to(gate_up.dtype)

"""SiTU-GLU, K3's bounded feed-forward activation. Letters: f half the width of the input."""

from __future__ import annotations

from torch import Tensor

from .. import backends

__all__ = ["situ_glu"]


def situ_glu(
    gate_up: Tensor, beta: float = 4.0, linear_beta: float = 25.0, *, backend: str = "auto"
) -> Tensor:
    """beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta), with [g, u] the halves of gate_up.

    gate_up [..., 2f] -> [..., f] in its dtype; FP32 inside. Bounded by beta * linear_beta; tends to SwiGLU as
    both grow. K3 report (arXiv:2607.24653); backends: triton, lean, reference.
    """
    output: Tensor = backends.call("situ", backend, gate_up, gate_up, beta, linear_beta)
    return output

"""The expert mathematics, as the data path sees them: handed in by the model.

An expert is y = W2 activation(W1 x). Letters: n rows, g groups, l latent width, f expert FFN width; weights
are W1 [2 f, l] (gate above up) and W2 [l, f], as torch's linear layers keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .sums import wide


@dataclass(frozen=True)
class Segments:
    """How n rows lie in g groups, one group after another."""

    counts: list[int]
    """Rows of each group, padding included; on the host."""
    ends: Tensor
    """int32 [g], where each group ends; on the device."""


class ExpertMath(Protocol):
    """Products of grouped rows, and the activation. No autograd inside; never called without rows.

    Rows come grouped by `segments`; `weights` holds one matrix for each group, all of one shape. Padding
    rows are zero and their results are not used, but they must not spoil weight gradients: zero in, zero out.
    """

    def multiply(self, rows: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        """rows [n, i], weights [o, i] to [n, o]: y = W x."""
        ...

    def input_gradient(self, grad: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        """grad [n, o], weights [o, i] to [n, i]: W^T g."""
        ...

    def weight_gradients(self, grad: Tensor, rows: Tensor, segments: Segments) -> Sequence[Tensor | None]:
        """grad [n, o], rows [n, i] to one [o, i] a group: g x^T; None or zeros for a group without rows."""
        ...

    def activate(self, gate_up: Tensor) -> Tensor:
        """[n, 2 f] to [n, f]."""
        ...

    def activate_backward(
        self, gate_up: Tensor, grad: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `activate_backward` below, which does it for any activation."""
        ...


def activate_backward(
    activation: Callable[[Tensor], Tensor],
    gate_up: Tensor,
    grad: Tensor,
    weights: Tensor,
    seen: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of weights * (W2 activation(gate_up)) up to W2^T, which the caller applied: grad = W2^T g.

    With a = activation(gate_up): the gradient of a row's weight is <grad, a>, which needs no W2 a.
    Kimi K3 report (arXiv:2607.24653), after SonicMoE.

    Args:
        activation: differentiable, [n, 2 f] to [n, f].
        gate_up: [n, 2 f].
        grad: [n, f], not multiplied by the weights.
        weights: [n] FP32 (FP64), zero for padding.
        seen: what the second projection sees of a, where it is not a; gradients pass it unchanged.

    Returns:
        the gradient of gate_up [n, 2 f], weights * a [n, f] (whose product with g is W2's gradient), both in
        the dtype of gate_up, and the gradient of the weights [n] in theirs.
    """
    kind = wide(gate_up.dtype)
    with torch.enable_grad():
        leaf = gate_up.detach().requires_grad_()
        active = activation(leaf)
    (grad_gate_up,) = torch.autograd.grad(active, leaf, (grad.to(kind) * weights[:, None]).to(active.dtype))
    active = active.detach() if seen is None else seen(active.detach())
    active = active.to(kind)
    grad_weights = (grad.to(kind) * active).sum(-1)
    return grad_gate_up, (active * weights[:, None]).to(gate_up.dtype), grad_weights

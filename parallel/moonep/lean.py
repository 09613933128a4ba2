"""Dispatch, experts and combine as one step of autograd that keeps little.

Kept from forward to backward: the latent tokens (which their producer keeps anyway), the router's weights of
this rank's rows [n], the route (index tensors), and gate_up [n, 2 f], the product before the activation;
the last not even that with `recompute_gate_up`. Backward sends the tokens again to rebuild the input of the
experts, behind the products of the second projection, fetches borrowed experts again, and takes the gradient
of the router's weights from the activation, so that expert outputs are not kept. Kimi K3 report
(arXiv:2607.24653). `dispatcher` is the readable counterpart.

Letters: S tokens, K experts of a token, l latent width, f expert FFN width, n rows, P experts at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .codec import EXACT, Codec
from .exchange import (
    HomeGradients,
    return_entries,
    return_scalars,
    return_sums,
    send_rows,
    send_scalars,
)
from .experts import ExpertMath
from .route import Route
from .sums import wide
from .transport import Pending, Transport
from .waves import BorrowedExperts, Wave, waves


@dataclass(frozen=True)
class Lean:
    """How one layer's call is carried out."""

    route: Route
    transport: Transport
    math: ExpertMath
    slots: int
    """Most borrowed experts to hold at a time."""
    sums: bool
    """What a rank owes to a token travels back as one sum (FP32), not as one row for each entry."""
    recompute_gate_up: bool = False
    codec: Codec = EXACT
    sent: Sent | None = None
    """The forward's transfers, where they have been started before."""


@dataclass(frozen=True)
class Sent:
    """A forward's tokens and first borrowed experts on their way; used once."""

    rows: Pending[Tensor]
    experts: BorrowedExperts


def send(
    route: Route,
    transport: Transport,
    slots: int,
    latent: Tensor,
    own: tuple[Sequence[Tensor], ...],
    codec: Codec = EXACT,
) -> Sent:
    """Start them; collective. latent [S, l]; own are the experts at home, W1 and W2."""
    first, second = own
    rows = send_rows(route, transport, latent)
    return Sent(rows, BorrowedExperts(transport, waves(route, slots), slots, (first, second), codec))


def mix(latent: Tensor, weights: Tensor, call: Lean, w1: Sequence[Tensor], w2: Sequence[Tensor]) -> Tensor:
    """The weighted sum of each token's experts, latent [S, l] to [S, l]; collective both ways.

    Args:
        latent: [S, l] in the model's dtype.
        weights: [S, K] FP32 (FP64), of the entries of the route's choice.
        call: the route and how to follow it.
        w1, w2: P tensors [2 f, l] and [l, f] each, the experts at home.
    """
    output: Tensor = _Mix.apply(latent, weights, call, *w1, *w2)
    return output


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latent: Tensor, weights: Tensor, call: Lean, *own: Tensor) -> Tensor:
        route, transport, places = call.route, call.transport, call.route.places
        both = own[:places], own[places:]
        sent = call.sent or send(route, transport, call.slots, latent, both, call.codec)
        weights_coming = send_scalars(route, transport, weights)
        rows = call.codec.rows(sent.rows.wait())  # [n, l]
        outputs, gate_ups = [], []
        for wave, w1, w2 in sent.experts:
            if not wave.empty:
                gate_up = call.math.multiply(rows[wave.rows], w1, wave.segments)
                outputs.append(call.math.multiply(call.math.activate(gate_up), w2, wave.segments))
                gate_ups += [] if call.recompute_gate_up else [gate_up]
                del gate_up
        row_weights = weights_coming.wait()
        del rows
        ctx.call = call
        ctx.save_for_backward(latent, row_weights, *own, *gate_ups)
        joined = _join(outputs, latent)
        del outputs
        if call.sums:
            return return_sums(route, transport, joined, row_weights, wide(joined.dtype)).wait()
        return return_entries(route, transport, joined, weights).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Backward(ctx).run(grad.contiguous())


class _Backward:
    """One backward pass; its attributes are what its waves share."""

    def __init__(self, ctx: Any) -> None:
        latent, row_weights, *rest = ctx.saved_tensors
        self.call: Lean = ctx.call
        self.route, self.transport, self.math = self.call.route, self.call.transport, self.call.math
        places = self.route.places
        self.own = rest[:places], rest[places : 2 * places]
        self.gate_ups: list[Tensor] = rest[2 * places :]
        self.latent, self.row_weights = latent, row_weights
        self.trained = any(ctx.needs_input_grad[3:])
        self.home = [HomeGradients(self.transport, own, self.call.slots) for own in self.own]
        self.grad_rows: list[Tensor] = []
        self.grad_row_weights: list[Tensor] = []

    def run(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad [S, l] to the gradients of what `_Mix.forward` took."""
        coming = send_rows(self.route, self.transport, grad)
        cut = waves(self.route, self.call.slots)
        experts = BorrowedExperts(self.transport, cut, self.call.slots, self.own, self.call.codec)
        if self.trained or self.call.recompute_gate_up:
            self._rows_coming = send_rows(self.route, self.transport, self.latent)
        self._rows: Tensor | None = None
        self.grads = coming.wait()  # [n, l]
        returned: list[Pending[Tensor]] = []
        for wave, w1, w2 in experts:
            grad_gate_up = self._through_experts(wave, w1, w2)
            if wave is cut[-1]:
                # All rows are done: they travel while the last weight gradients are computed.
                returned = self._return()
            self._weight_gradients(wave, 0, grad_gate_up)
            del grad_gate_up
        grad_latent, grad_weights = (arriving.wait() for arriving in returned)
        own: list[Tensor | None] = [None] * (2 * self.route.places)
        if self.trained:
            own = [each for home in self.home for each in home.result()]
        return grad_latent, grad_weights, None, *own

    def _through_experts(self, wave: Wave, w1: list[Tensor], w2: list[Tensor]) -> Tensor | None:
        """Back to the experts' input, W2's gradients on the way; returns the gradient of gate_up."""
        if wave.empty:
            self._weight_gradients(wave, 1, None)
            return None
        grads = self.grads[wave.rows]
        inner = self.math.input_gradient(grads, w2, wave.segments)  # [n, f]
        if self.call.recompute_gate_up:
            gate_up = self.math.multiply(self._input()[wave.rows], w1, wave.segments)
        else:
            gate_up = self.gate_ups.pop(0)
        grad_gate_up, weighted, grad_weights = self.math.activate_backward(
            gate_up, inner, self.row_weights[wave.rows]
        )
        del inner, gate_up
        self.grad_row_weights.append(grad_weights)
        self._weight_gradients(wave, 1, grads, weighted)
        self.grad_rows.append(self.math.input_gradient(grad_gate_up, w1, wave.segments))
        return grad_gate_up

    def _weight_gradients(
        self, wave: Wave, projection: int, grad: Tensor | None, rows: Tensor | None = None
    ) -> None:
        """Gradients of W1 (0, of the experts' input) or W2 (1); borrowed experts' start home. Collective."""
        if not self.trained:
            return
        home, places = self.home[projection], wave.home.stop - wave.home.start
        found: Sequence[Tensor | None] = [None] * places
        if grad is not None:
            rows = self._input()[wave.rows] if rows is None else rows
            found = self.math.weight_gradients(grad, rows, wave.segments)
        home.add_own(found[:places], wave.home.start)
        home.send(wave.wanted, found[places:])

    def _input(self) -> Tensor:
        """The experts' input [n, l], rebuilt from the tokens that were sent again."""
        if self._rows is None:
            self._rows = self.call.codec.rows(self._rows_coming.wait())
        return self._rows

    def _return(self) -> list[Pending[Tensor]]:
        """Start the gradients of tokens and router weights on their way; all waves have been through."""
        del self.grads
        grad_rows, like = _join(self.grad_rows, self.latent), self.row_weights
        self.grad_rows.clear()
        # A gradient's partial sums travel in the model's dtype, as any gradient between layers does.
        tokens = return_sums(self.route, self.transport, grad_rows, None, grad_rows.dtype)
        grad_weights = torch.cat(self.grad_row_weights) if self.grad_row_weights else like.new_empty(0)
        return [tokens, return_scalars(self.route, self.transport, grad_weights)]


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    """Parts [., l] one after another, without a copy if there is one; without any, no rows like [S, l]."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else like.new_empty(0, like.shape[1])

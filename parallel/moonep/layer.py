"""Balanced experts of one MoE layer: the entrance for the model.

Letters: R ranks, E routed experts, P = E/R at home on a rank, S tokens, K experts of a token, l latent width,
f expert FFN width. Expert numbers are physical: x lives on rank x // P at place x % P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .codec import EXACT, Codec
from .experts import ExpertMath
from .lean import Lean, Sent, mix, send
from .plan import FILL, Policy
from .route import Planner, Planning, Route
from .stats import Stats
from .sums import wide
from .transport import Transport, open_transport


@dataclass
class Routed:
    """A choice on its way to becoming a route; keep it to follow the same plan again."""

    choice: Tensor
    """[S, K] physical experts."""
    _planning: Planning
    _moonep: MoonEP
    _counted: bool = True
    _route: Route | None = None
    _sent: Sent | None = None

    def route(self, expert_bytes: int = 0) -> Route:
        """The route; the first call waits for the plan's sizes on the host and is collective."""
        if self._route is None:
            self._route = self._planning.finish(self._moonep.transport)
            if self._counted:
                self._moonep.stats.count(
                    self._route.sizes, self._planning.clock, self._moonep.slots, expert_bytes
                )
        return self._route


class MoonEP:
    """Computes a token's experts so that every rank of the group computes equally many rows.

    Holds no parameters. Every method that takes a choice or tokens is collective, forward and backward.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        *,
        device: torch.device,
        policy: Policy = FILL,
        slots: int | None = None,
        transport: str | Transport = "auto",
        pad: int = 1,
        planner: str = "auto",
        equal_tokens: bool = False,
        combine: str = "auto",
        recompute_gate_up: bool = False,
        codec: Codec = EXACT,
    ) -> None:
        """
        Args:
            group: ranks that share the experts; None for this rank alone.
            num_experts: E, a multiple of R.
            device: of the tokens.
            policy: who computes what; one that learns needs an object for each layer.
            slots: borrowed experts held at a time, 1 .. P; P when left out.
            transport: auto, collective or peer, or one already open.
            pad: rows of each expert are rounded up to a multiple of this many.
            planner: backend of the planner.
            equal_tokens: the caller promises S to be the same on all ranks; planning then never waits for
                the device.
            combine: "entries" brings each entry's output back by itself; "sums" what a rank owes to a token,
                as one FP32 sum. Both round outputs to the model's dtype, weight and add them in FP32, and
                round once; they differ in the order of addition. "auto" takes what moves fewer bytes.
            recompute_gate_up: do not keep the product before the activation for backward.
            codec: what the products see of rows and weights, and how weights travel.

        Raises:
            ValueError: an argument is out of range, or the transport cannot run (TransportError).
        """
        self.transport = open_transport(transport, group, device) if isinstance(transport, str) else transport
        self.num_experts, ranks = num_experts, self.transport.ranks
        if num_experts % ranks:
            raise ValueError(f"{num_experts} experts on {ranks} ranks: the ranks must divide the experts")
        self.places = num_experts // ranks
        self.slots = self.places if slots is None else slots
        if not 1 <= self.slots <= self.places:
            raise ValueError(f"parallel.expert.slots={slots}: use 1 to {self.places}, the experts of a rank")
        if combine not in ("auto", "sums", "entries"):
            raise ValueError(f"combine={combine}: use auto, sums or entries")
        self.combine, self.recompute_gate_up, self.codec = combine, recompute_gate_up, codec
        self.planner = Planner(
            self.transport, num_experts, policy=policy, pad=pad, backend=planner, equal_tokens=equal_tokens
        )
        self.stats = Stats(self.transport.rank)

    def plan(self, choice: Tensor, *, counted: bool = True) -> Routed:
        """Start planning; whatever the caller does before `__call__` hides it. choice int [S, K].

        `counted`: the call goes into `stats`.
        """
        return Routed(choice, self.planner.start(choice), self, counted)

    @torch.no_grad()
    def send(self, latent: Tensor, routed: Routed, w1: Sequence[Tensor], w2: Sequence[Tensor]) -> None:
        """Start the transfers of the call that follows, so that what is done in between hides them.

        Takes the same latent, plan and experts. Waits for the plan's sizes on the host.
        """
        route = routed.route(self._expert_bytes(w1, w2))
        routed._sent = send(route, self.transport, self.slots, latent.detach(), (w1, w2), self.codec)

    def __call__(
        self,
        latent: Tensor,
        weights: Tensor,
        routed: Routed,
        math: ExpertMath,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
    ) -> Tensor:
        """The weighted sum of each token's experts, latent [S, l] to [S, l] in its dtype; differentiable.

        Args:
            latent: [S, l] in the model's dtype.
            weights: [S, K] FP32 (FP64 with FP64 latents).
            routed: from `plan`; the same object again follows the same plan (recompute).
            math: the expert mathematics.
            w1, w2: P tensors [2 f, l] and [l, f] each, contiguous, by place. Their gradients are never None.
        """
        sent, routed._sent = routed._sent, None
        call = Lean(
            routed.route(self._expert_bytes(w1, w2)), self.transport, math, self.slots,
            self._sums(latent.dtype, weights.shape[1]), self.recompute_gate_up, self.codec, sent,
        )  # fmt: skip
        return mix(latent, weights, call, w1, w2)

    def _expert_bytes(self, w1: Sequence[Tensor], w2: Sequence[Tensor]) -> int:
        """What travels of one expert."""
        return self.codec.nbytes(w1[0]) + self.codec.nbytes(w2[0])

    def _sums(self, dtype: torch.dtype, top_k: int) -> bool:
        """Whether sums travel: by their expected number with experts chosen evenly, the same on all ranks."""
        if self.combine != "auto":
            return self.combine == "sums"
        ranks = self.transport.ranks
        payloads = ranks * (1 - (1 - 1 / ranks) ** top_k)
        return payloads * wide(dtype).itemsize <= top_k * dtype.itemsize

"""megatron-core's token dispatcher, phase by phase, in pieces that autograd knows: the readable reference.

It keeps everything that autograd wants; `lean` gives the same values and keeps little. Expert weights are
those of the group's ranks: `borrow` between dispatch and experts adds the fetched ones. Outputs come back one
row for each entry, and are weighted where the token lives, as K3 rounds them. Letters: s sequence, b batch,
S = s b tokens, E experts, K of a token, P at home on a rank, l latent width; u payloads sent, v received,
m entries received, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .exchange import HomeGradients, fetch_experts
from .layer import MoonEP
from .route import Split
from .sums import wide
from .transport import Transport


class MoonEPDispatcher(MoETokenDispatcher):
    """Balanced experts through megatron-core's six phases. Expert numbers are physical."""

    def __init__(
        self, moonep: MoonEP, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config, pg_collection)
        self.moonep, self.transport = moonep, moonep.transport

    def dispatch_preprocess(  # type: ignore[override]
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Plan, and gather the payloads.

        Args:
            tokens: [s, b, l].
            routing_map: bool [S, E] with K experts a token; or the choice itself, int [S, K].
            probs: [S, E], zero where not routed; or weights [S, K].

        Returns:
            payloads [u, l] and weights [S, K].
        """
        self.shape = tokens.shape
        choice, self.weights = routing_map, probs
        if routing_map.dtype == torch.bool:
            # Routed experts first, in the order of their numbers.
            order: Tensor = (~routing_map).to(torch.int8).argsort(dim=-1, stable=True)
            choice = order[:, : self.config.moe_router_topk]
            self.weights = probs.gather(-1, choice)
        self.route = self.moonep.plan(choice).route()
        return tokens.reshape(-1, self.shape[-1])[self.route.tokens], self.weights

    def token_dispatch(self, payloads: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """payloads [u, l] to those received [v, l]; weights stay where they are."""
        return _exchange(payloads, self.transport, self.route.sizes.payloads), weights

    def dispatch_postprocess(self, received: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """[v, l] to rows [n, l] by expert, padded with zeros; and the rows of each group [P + slots]."""
        padding = received.new_zeros(1, received.shape[1])
        rows = torch.cat([received, padding])[self.route.row_payloads]
        used = self.route.places + len(self.route.sizes.slots[self.transport.rank])
        rows_per_expert = torch.tensor([0, *self.route.sizes.ends[:used]]).diff()
        return rows, rows_per_expert, weights

    def borrow(self, w1: Sequence[Tensor], w2: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The P experts at home of either projection, followed by those in this rank's slots."""
        self.anchor, *slots = _Fetch.apply(self.transport, self.route.sizes.slots, *w1, *w2)
        used = len(slots) // 2
        return [*w1, *slots[:used]], [*w2, *slots[used:]]

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Expert outputs [n, l] to one row for each entry received [m, l]."""
        # Without rows nothing here depends on what was fetched, and other ranks wait for the way back.
        return (rows + self.anchor)[self.route.entry_rows]

    def token_combine(self, rows: Tensor) -> Tensor:
        """[m, l] back to the entries of this rank [S K, l], in the order in which they left."""
        return _exchange(rows, self.transport, self.route.sizes.entries.back)

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Weight and sum rows [S K, l] into tokens [s, b, l], in FP32 (FP64), then round once."""
        entries = torch.zeros_like(rows).index_copy(0, self.route.by_rank, rows)
        terms = entries.view(self.route.token_count, self.route.top_k, rows.shape[1]).to(wide(rows.dtype))
        return (terms * self.weights[..., None]).sum(1).to(rows.dtype).view(self.shape)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: Transport, split: Split) -> Tensor:
        ctx.transport, ctx.split = transport, split
        return split.exchange(transport, rows).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.split.back.exchange(ctx.transport, grad).wait(), None, None


def _exchange(rows: Tensor, transport: Transport, split: Split) -> Tensor:
    output: Tensor = _Exchange.apply(rows, transport, split)
    return output


class _Fetch(torch.autograd.Function):
    """Copies of wanted experts; backward sends their gradients home. The first output is a zero to depend on.

    Both projections in one node: the order of backward collectives is then the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, transport: Transport, wanted: list[list[int]], *own: Tensor) -> tuple[Tensor, ...]:
        ctx.transport, ctx.wanted = transport, wanted
        ctx.save_for_backward(*own)
        coming = fetch_experts(transport, wanted, _halves(own))
        return own[0].new_zeros(()), *(slot for each in coming for slot in each.wait())

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = []
        for own, sent in zip(_halves(ctx.saved_tensors), _halves(gradients), strict=True):
            home = HomeGradients(ctx.transport, own, len(own))
            home.send(ctx.wanted, sent)
            found += home.result()
        return None, None, *found


def _halves(both: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return both[: len(both) // 2], both[len(both) // 2 :]

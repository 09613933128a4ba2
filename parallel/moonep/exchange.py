"""Moving rows, experts and gradients along a route. No autograd: `lean` and `dispatcher` give it both ways.

Letters: S tokens, K experts of a token, l latent width; u payloads sent, v payloads received, m entries
received, n rows of this rank including padding (see `route`); P experts at home.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from .route import Route
from .sums import sum_rows, wide
from .transport import Pending, Transport, Wanted


def send_rows(route: Route, transport: Transport, tokens: Tensor) -> Pending[Tensor]:
    """Rows [n, l] of this rank's experts out of every rank's tokens [S, l]; padding is zero.

    A token travels once to each rank; there it is copied to all of its rows.
    """
    payloads = route.sizes.payloads
    buffer = tokens.new_empty(sum(payloads.received) + 1, tokens.shape[1])  # [v + 1, l]
    buffer[-1] = 0  # what padding rows are copies of
    arriving = payloads.exchange(transport, tokens[route.tokens], into=buffer[:-1])
    return arriving.then(lambda _: buffer[route.row_payloads])


def send_scalars(route: Route, transport: Transport, values: Tensor) -> Pending[Tensor]:
    """Values [S, K] of every rank's entries to their rows [n]; padding is zero."""
    arriving = route.sizes.entries.exchange(transport, values.reshape(-1)[route.by_rank])
    rows = route.sizes.rows
    return arriving.then(lambda arrived: arrived.new_zeros(rows).scatter_(0, route.entry_rows, arrived))


def return_scalars(route: Route, transport: Transport, values: Tensor) -> Pending[Tensor]:
    """The way back of `send_scalars`: values [n] of rows to the entries [S, K] where they come from."""
    arriving = route.sizes.entries.back.exchange(transport, values[route.entry_rows])
    shape = (route.token_count, route.top_k)
    return arriving.then(
        lambda arrived: torch.empty_like(arrived).scatter_(0, route.by_rank, arrived).view(shape)
    )


def return_sums(
    route: Route, transport: Transport, rows: Tensor, row_weights: Tensor | None, travel: torch.dtype
) -> Pending[Tensor]:
    """Sum rows [n, l] into the tokens [S, l] they belong to, on both sides of the transfer.

    Each row is multiplied by its weight [n] if given. What a rank owes to a token is summed there and
    travels once, as `travel`. Products and sums are FP32 (FP64 for FP64 rows), in a fixed order; the result
    is rounded once, to the dtype of `rows`.
    """
    weights = None if row_weights is None else row_weights[route.entry_rows]
    sums = sum_rows(rows, route.entry_rows, route.payload_offsets, weights, travel)  # [v, l]
    arriving = route.sizes.payloads.back.exchange(transport, sums)
    return arriving.then(
        lambda arrived: sum_rows(arrived, route.payloads_by_token, route.token_offsets, None, rows.dtype)
    )


def return_entries(route: Route, transport: Transport, rows: Tensor, weights: Tensor) -> Pending[Tensor]:
    """Bring each row [n, l] back by itself, in its own dtype; sum with weights [S, K] into tokens [S, l].

    Products and sums are FP32 (FP64), in the order of k, rounded once.
    """
    arriving = route.sizes.entries.back.exchange(transport, rows[route.entry_rows])

    def combine(arrived: Tensor) -> Tensor:
        place = torch.empty_like(route.by_rank)
        place.scatter_(0, route.by_rank, torch.arange(place.numel(), device=place.device))
        offsets = torch.arange(route.token_count + 1, device=place.device) * route.top_k
        return sum_rows(arrived, place, offsets, weights.reshape(-1), rows.dtype)

    return arriving.then(combine)


def fetch_experts(
    transport: Transport, wanted: Wanted, own: Sequence[Sequence[Tensor]]
) -> list[Pending[list[Tensor]]]:
    """Copies of the wanted experts; `own` holds, for each projection, the P weights at home."""
    return [transport.fetch_experts(wanted, weights) for weights in own]


class HomeGradients:
    """Gradients of the P experts at home for one projection: own ones, and what replicas send home.

    Contributions to an expert are added in FP32 (FP64), its own first where the slots hold all that is
    borrowed, then by rank, wave after wave; rounded once to the parameter's dtype. Sent in that dtype.
    """

    def __init__(self, transport: Transport, own: Sequence[Tensor], slots: int) -> None:
        """`slots`: most gradients on their way from a rank; before more are sent, the oldest are added."""
        self.transport, self.slots, self._own = transport, slots, own
        self._totals: list[Tensor | None] = [None] * len(own)
        self._pending: deque[tuple[int, Pending[list[list[Tensor]]]]] = deque()

    def add_own(self, gradients: Sequence[Tensor | None], first: int = 0) -> None:
        """Gradients of this rank's own rows, of the places from `first` on; None for one without any."""
        for place, gradient in enumerate(gradients, start=first):
            self._add(place, gradient)

    def send(self, wanted: Wanted, gradients: Sequence[Tensor | None]) -> None:
        """Send a wave's slot gradients home, collective."""
        most = max(map(len, wanted))
        if not most:
            return
        while self._pending and most + sum(count for count, _ in self._pending) > self.slots:
            self._settle()
        like = self._own[0]
        filled = [torch.zeros_like(like) if g is None else g.to(like.dtype) for g in gradients]
        coming = self.transport.return_gradients(wanted, filled, len(self._own), like)
        self._pending.append((most, coming))

    def _settle(self) -> None:
        """Add what the oldest `send` brought."""
        _, coming = self._pending.popleft()
        for place, pieces in enumerate(coming.wait()):
            for piece in pieces:
                self._add(place, piece)

    def result(self) -> list[Tensor]:
        """[P] gradients, zeros for an expert that nobody used."""
        while self._pending:
            self._settle()
        pairs = zip(self._totals, self._own, strict=True)
        return [torch.zeros_like(own) if total is None else total.to(own.dtype) for total, own in pairs]

    def _add(self, place: int, piece: Tensor | None) -> None:
        if piece is None:
            return
        total = self._totals[place]
        if total is None:
            self._totals[place] = piece
            return
        # The first piece keeps its dtype until a second one comes: most experts have one.
        self._totals[place] = total.to(wide(piece.dtype)).add_(piece)

"""Keys and values of items that lie on several ranks, brought to the queries on each of them.

One exchange of both for all items; backward is the mirror. Letters: L patches of this rank's pieces, K those
of all items of which it has a piece, m rows that are sent, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.sites import collective
from parallel.context.exchange import exchange_rows

from ...vision_context import KeyPlan, Slice

NAME = "vision.keys"
"""Under which `parallel.context.exchange.traffic` counts."""


def gather_keys(k: Tensor, v: Tensor, plan: KeyPlan, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """k and v [L, H, D] to [K, H, D] each, items in their order, the pieces of each in the order of ranks."""
    sent: Tensor = _Copies.apply(k, v, plan.give)  # [m, 2 H, D]
    came = collective(exchange_rows(sent, plan.send, plan.receive, group, name=NAME))
    keys, values = _taken(came, plan.take).chunk(2, dim=1)
    return keys, values


def _taken(came: Tensor, take: Sequence[Slice]) -> Tensor:
    """The rows in the order of `take`, slices that hold each row once."""
    if len(take) < 2:
        return came
    order = sorted(range(len(take)), key=take.__getitem__)
    parts = came.split([take[index][1] - take[index][0] for index in order])
    places = {index: place for place, index in enumerate(order)}
    return torch.cat([parts[places[index]] for index in range(len(take))])


class _Copies(torch.autograd.Function):
    """Slices of k and v side by side. Backward sums what is said of a row in order, in FP32 or wider."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, give: tuple[Slice, ...]) -> Tensor:
        length, heads, width = k.shape
        ctx.give, ctx.length = give, length
        borders = _borders(give)
        copies = k.new_empty(borders[-1], 2 * heads, width)
        for (start, stop), (first, last) in zip(give, pairwise(borders), strict=True):
            copies[first:last, :heads] = k[start:stop]
            copies[first:last, heads:] = v[start:stop]
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.length, *grad.shape[1:], dtype=wide, device=grad.device)
        for (start, stop), (first, last) in zip(ctx.give, pairwise(_borders(ctx.give)), strict=True):
            total[start:stop] += grad[first:last]
        of_k, of_v = total.to(grad.dtype).chunk(2, dim=1)
        return of_k, of_v, None


def _borders(slices: Sequence[Slice]) -> list[int]:
    """Where slices start that are put one behind another, and the end."""
    borders = [0]
    for start, stop in slices:
        borders.append(borders[-1] + stop - start)
    return borders

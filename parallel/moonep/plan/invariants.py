"""What every plan has to satisfy, checked on the tensors. Letters: R ranks, E experts, P = E/R, G = 2P.

The five rules: no negative rows; every entry of every expert is computed once; every rank computes its
capacity (balanced policies only); no rank uses more than P slots; padded segments fit into the buffer and do
not overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import Plan, at_home


class PlanError(ValueError):
    """A plan breaks a rule."""


def check(plan: Plan, counts: Tensor, *, balanced: bool = True) -> None:
    """Verify a plan against the counts [R, E] that it was made from. Waits for the device.

    Raises:
        PlanError: with the rule, and the rank and expert that break it first.
    """
    check_allocation(plan.alloc, counts, balanced=balanced)
    _check_segments(plan)
    _check_rows(plan, counts)


def check_allocation(alloc: Tensor, counts: Tensor, *, balanced: bool = True) -> None:
    """Verify allocations [..., R, E] against counts [..., R, E]; leading dimensions are separate cases.

    Raises:
        PlanError: with the rule, and the case, rank and expert that break it first.
    """
    ranks, experts = alloc.shape[-2:]
    places = experts // ranks
    _refuse(alloc < 0, "negative rows", ("rank", "expert"))
    lost = alloc.sum(-2) != counts.sum(-2)
    _refuse(lost, "not every entry is computed once", ("expert",))
    load = alloc.sum(-1)
    if balanced:
        _refuse(load != _capacities(counts.sum((-2, -1)), ranks), "not its capacity of rows", ("rank",))
    away = (alloc > 0).unflatten(-1, (ranks, places))
    eye = torch.eye(ranks, dtype=torch.bool, device=alloc.device)
    remote = (away & ~eye[:, :, None]).sum((-2, -1))
    _refuse(remote > places, f"more than {places} slots used", ("rank",))


def _capacities(total: Tensor, ranks: int) -> Tensor:
    rank = torch.arange(ranks, device=total.device)
    return total[..., None] // ranks + (rank < total[..., None] % ranks)


def _check_segments(plan: Plan) -> None:
    """Padded segments: as long as they must be, one behind the other, inside the buffer."""
    rows = torch.cat([at_home(plan.alloc), _slot_rows(plan)], 1)  # [R, G]
    padded = -(-rows // plan.pad) * plan.pad
    _refuse(padded.cumsum(1) != plan.ends, "segments overlap or leave a gap", ("rank", "segment"))
    _refuse(plan.ends[:, -1:] > plan.stride, f"more rows than the buffer's {plan.stride}", ("rank",))
    segment = _segments_of(plan)  # [R, E], -1 where an expert has no segment
    _refuse((plan.alloc > 0) & (segment < 0), "rows of an expert without a slot", ("rank", "expert"))
    begin = (plan.ends - padded).gather(1, segment.clamp(min=0))
    _refuse((plan.alloc > 0) & (begin != plan.starts), "rows start outside their segment", ("rank", "expert"))


def _slot_rows(plan: Plan) -> Tensor:
    used = plan.slots >= 0
    return plan.alloc.gather(1, plan.slots.clamp(min=0).long()) * used


def _segments_of(plan: Plan) -> Tensor:
    ranks, experts, places = plan.ranks, plan.experts, plan.places
    segment = torch.full((ranks, experts + 1), -1, device=plan.alloc.device)
    numbers = torch.arange(places, 2 * places, device=plan.alloc.device).expand(ranks, -1)
    segment.scatter_(1, torch.where(plan.slots >= 0, plan.slots, experts).long(), numbers)
    own = torch.arange(experts, device=plan.alloc.device).view(ranks, places)
    segment.scatter_(1, own, numbers - places)
    return segment[:, :-1]


def _check_rows(plan: Plan, counts: Tensor) -> None:
    """Entries of this rank: no two in one row, and as many to each destination as announced."""
    ordered = plan.rows.sort().values
    _refuse(ordered[1:] == ordered[:-1], "two entries in one row", ("entry",))
    sent = torch.zeros(plan.ranks, dtype=torch.int64, device=plan.rows.device)
    sent.index_add_(0, plan.rows // plan.stride, torch.ones_like(plan.rows))
    _refuse(sent != plan.send[plan.rank], "sends otherwise than announced", ("destination",))
    _refuse(plan.send.sum(1) != counts.sum(1), "does not send all its entries", ("rank",))
    _refuse(plan.send.sum(0) != plan.load, "does not receive all its rows", ("rank",))


def _refuse(bad: Tensor, rule: str, names: tuple[str, ...]) -> None:
    found = bad.nonzero()
    if not len(found):
        return
    index = found[0].tolist()
    place = [f"{name} {at}" for name, at in zip(names, index[-len(names) :], strict=True)]
    cases = [f"case {at}" for at in index[: -len(names)]]
    raise PlanError(f"{', '.join([*cases, *place])}: {rule}")

"""Planning of balanced expert parallelism: counts in, an allocation, its tables and every entry's row out.

Every rank plans for itself from the same gathered counts and comes to the same tables. Letters: R ranks,
E experts, P = E/R, S tokens of this rank, K experts of a token, G = 2P segments of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import BackendError, resolve
from .eplb import Eplb
from .invariants import PlanError, check
from .policy import FILL, NONE, Policy
from .types import Plan

__all__ = [
    "FILL",
    "NONE",
    "BackendError",
    "Eplb",
    "Plan",
    "PlanError",
    "Policy",
    "check",
    "plan",
    "row_capacity",
]


def plan(
    counts: Tensor,
    choice: Tensor,
    rank: int,
    *,
    pad: int = 1,
    policy: Policy = FILL,
    backend: str = "auto",
    total_rows: int | None = None,
    debug: bool = False,
) -> Plan:
    """Plan one layer.

    Args:
        counts: int [R, E], entries that each source rank routes to each physical expert.
        choice: int [S, K], physical experts of this rank's tokens; counted in counts[rank]. One expert may
            stand several times in a token.
        rank: this rank in the group.
        pad: each segment that is not empty is rounded up to a multiple of so many rows.
        policy: who computes what.
        backend: auto, triton, torch or reference; all give the same plan.
        total_rows: sum of counts, where the host knows it (R * S * K with equal token counts). With it a
            balanced policy plans on a GPU without waiting for the device.
        debug: verify the plan; waits for the device.

    Raises:
        BackendError: no such backend, or it cannot run here.
        PlanError: `debug` is on and the plan breaks a rule.
    """
    ranks, experts = counts.shape
    assert ranks and experts % ranks == 0, f"{experts} experts on {ranks} ranks"
    assert 0 <= rank < ranks and pad >= 1 and choice.dim() == 2
    chosen = resolve(backend, counts.device.type, ranks, experts // ranks, choice.shape[1])
    counts = counts.to(torch.int32)
    alloc = policy(counts, chosen)
    if policy.balanced:
        stride = row_capacity(ranks, experts, _total(counts) if total_rows is None else total_rows, pad)
    else:
        stride = int((-(-alloc // pad) * pad).sum(1).max())
    tables, rows, first = chosen.lay_out(alloc, counts, choice, rank, pad, max(stride, 1))
    result = Plan(alloc, *tables, rows=rows, first=first, stride=max(stride, 1), pad=pad, rank=rank)
    if debug:
        check(result, counts, balanced=policy.balanced)
    return result


def row_capacity(ranks: int, experts: int, total_rows: int, pad: int) -> int:
    """Rows that the buffer of a rank needs for any balanced plan, padding of all G segments included."""
    busiest = -(-total_rows // ranks)
    segments = 2 * (experts // ranks)
    return -(-(busiest + (pad - 1) * segments) // pad) * pad


def _total(counts: Tensor) -> int:
    return int(counts.sum())

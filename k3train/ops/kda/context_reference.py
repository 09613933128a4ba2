"""Kimi Delta Attention over a context group, token by token and with gradients by autograd.

Letters: b batch, s this rank's columns, H heads, D key head dim, Dv value head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .context import Handover
from .reference import recurrent_kda, segment_map


def recurrent_kda_over_ranks(
    q: Tensor,  # [b, s, H, D]
    k: Tensor,  # [b, s, H, D]
    v: Tensor,  # [b, s, H, Dv]
    g: Tensor,  # [b, s, H, D]
    beta: Tensor,  # [b, s, H]
    *,
    scale: float,
    handover: Handover,
    document_ids: Tensor | None = None,  # [b, s]
) -> tuple[Tensor, Tensor]:
    """`reference.recurrent_kda` of this rank's columns, from the state that the ranks before leave.

    All ranks of the group call it, and all go through its backward.
    """
    transition, made = segment_map(k, v, g, beta, document_ids)
    maps = handover.gather(torch.cat((made, transition), dim=-1))
    state = handover.incoming(maps)
    return recurrent_kda(q, k, v, g, beta, scale=scale, initial_state=state, document_ids=document_ids)

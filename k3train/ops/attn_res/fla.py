"""AttnRes through flash-linear-attention's fused kernels. Letters: L sources, n tokens, d hidden.

Its own autograd function keeps the sources where no saved-tensor hook sees them; this one saves them for
backward like anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fla.ops.attnres.fused import fused_attnres_bwd, fused_attnres_fwd
from torch import Tensor

from ..tuning import fix_choices

FEWEST_SLOTS = 8
"""The kernels take a power of two of pointers, at least this many."""
RECOMPUTE_MIXTURE = 1
"""Level at which backward mixes the sources again for what it needs of the result."""


def attn_res(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `ops.attn_res.attn_res`."""
    fix_choices(torch.cuda.get_device_capability(query.device))
    rows = (source.flatten(0, -2).contiguous() for source in sources)  # [n, d] each
    output: Tensor = _AttnRes.apply(query, norm_weight, eps, *rows)
    return output.view(sources[0].shape)


def _slots(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sources, followed by so many times the first that the kernels' number of pointers is reached."""
    number = max(FEWEST_SLOTS, 1 << (len(rows) - 1).bit_length())
    return (*rows, *[rows[0]] * (number - len(rows)))


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, norm_weight: Tensor, eps: float, *rows: Tensor) -> Tensor:
        output, _, scale, logit, total = fused_attnres_fwd(
            q=query,
            residuals=rows,
            res=_slots(rows),
            w=norm_weight,
            ow=None,
            eps=eps,
            scale=1.0,
            checkpoint_level=RECOMPUTE_MIXTURE,
        )
        ctx.save_for_backward(query, norm_weight, scale, logit, total, *rows)
        ctx.eps = eps
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, norm_weight, scale, logit, total, *rows = ctx.saved_tensors
        grad_rows, grad_query, grad_norm_weight, _ = fused_attnres_bwd(
            do=grads[0].contiguous(),
            q=query,
            residuals=rows,
            res=_slots(rows),
            w=norm_weight,
            ow=None,
            o_pre=None,
            rstd=scale,
            logit=logit,
            lse=total,
            eps=ctx.eps,
            scale=1.0,
            checkpoint_level=RECOMPUTE_MIXTURE,
        )
        return grad_query, grad_norm_weight, None, *grad_rows

"""Kimi Delta Attention through flash-linear-attention's chunk kernels.

L2 norm, gate and their gradients run inside the kernels, which save q, k, v and the raw decay logits.
Letters: b batch, s sequence, H heads, D, Dv head dims.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from fla.ops.kda import chunk_bwd, chunk_kda
from torch import Tensor

from ..packing import Packing
from ..tuning import HOPPER, fix_choices
from .fla_context import attend_over_ranks

FUSED_BACKWARD = "chunk_kda_bwd_kernel_wy_dqkg_fused"


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float,
    packing: Packing,
) -> Tensor:
    """See `ops.kda.delta_attention`; raises RuntimeError when the Hopper exclusion cannot be made."""
    capability = torch.cuda.get_device_capability(q.device)
    exclude_bad_hopper_choice(capability)
    fix_choices(capability)
    if packing.span is not None:
        return attend_over_ranks([q, k, v, z, beta, A_log, dt_bias], lower_bound, packing)
    cu_seqlens = None
    arguments = [q, k, v, z, beta]
    if not packing.whole_rows:
        cu_seqlens = packing.cu_seqlens_int64
        arguments = [x.flatten(0, 1)[None] for x in arguments]  # [1, b*s, H, ...]
    output, _ = chunk_kda(
        *arguments,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        safe_gate=-5 <= lower_bound < 0,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
    )
    return output.view(v.shape)


@cache
def exclude_bad_hopper_choice(capability: tuple[int, int]) -> int:
    """Drop BK = 32 with 4 warps from the fused backward's autotuning on Hopper, where it computes wrongly.

    Returns how many choices were dropped: none with a release of the library that leaves them out itself.
    """
    if capability != HOPPER:
        return 0
    tuner = getattr(chunk_bwd, FUSED_BACKWARD, None)
    while tuner is not None and not hasattr(tuner, "configs"):
        tuner = getattr(tuner, "fn", None)
    if tuner is None:
        raise RuntimeError(
            f"fla.ops.kda.chunk_bwd has no autotuned {FUSED_BACKWARD}, so its wrong choice on Hopper cannot "
            "be excluded; use model.backends.kda=chunk or fla-core 0.6.0"
        )
    kept = [config for config in tuner.configs if not _is_bad(config)]
    dropped = len(tuner.configs) - len(kept)
    tuner.configs = kept
    return dropped


def _is_bad(config: Any) -> bool:
    return bool(config.kwargs.get("BK") == 32 and config.num_warps == 4)

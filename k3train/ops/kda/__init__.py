"""Kimi Delta Attention: gate, normalisation and the attention core behind one call.

Letters: b batch, s sequence, H heads, D key head dim, Dv value head dim.
"""

from __future__ import annotations

from torch import Tensor

from offload.sites import collective

from .. import backends
from ..packing import Packing
from .core import kda_gate, l2norm

__all__ = ["delta_attention", "kda_gate", "l2norm"]


def delta_attention(
    q: Tensor,  # [b, s, H, D]
    k: Tensor,  # [b, s, H, D]
    v: Tensor,  # [b, s, H, Dv]
    z: Tensor,  # [b, s, H, D], decay logits before the bias
    beta: Tensor,  # [b, s, H], after the sigmoid
    A_log: Tensor,  # [H] FP32
    dt_bias: Tensor,  # [H*D] FP32
    *,
    lower_bound: float,
    packing: Packing,
    backend: str = "auto",
) -> Tensor:
    """Normalise q and k per head, gate, and attend with scale D^-0.5: [b, s, H, Dv] in v's dtype.

    Inside, everything is FP32 (the `fla` kernels round chunk operands to q's dtype). The state starts at zero
    in every document of `packing`. K3 report (arXiv:2607.24653); backends: fla, chunk, recurrent,
    triton.
    """
    output: Tensor = backends.call(
        "kda", backend, v, q, k, v, z, beta, A_log, dt_bias, lower_bound=lower_bound, packing=packing
    )
    return output if packing.span is None else collective(output)

"""Causal softmax attention within documents.

Letters: b batch, s sequence, H heads, Dq query and key head dim, Dv value head dim; t = s, or more keys than
queries with `Fragments`.
"""

from __future__ import annotations

from torch import Tensor

from .. import backends
from ..packing import Packing
from .fragments import Fragments

__all__ = ["Fragments", "causal_attention"]


def causal_attention(
    q: Tensor,  # [b, s, H, Dq]
    k: Tensor,  # [b, t, H, Dq]
    v: Tensor,  # [b, t, H, Dv]
    *,
    scale: float,
    packing: Packing | Fragments,
    backend: str = "auto",
) -> Tensor:
    """softmax(scale q k^T) v over the same and earlier tokens of the same document: [b, s, H, Dv].

    K3 trains with an FP32 attention output. `reference` returns FP32; the kernels behind the other backends
    accumulate in FP32 and round once to v's dtype, so cast the product with the output gate, not this.
    Backends: te (cuDNN through Transformer Engine), flash (torch's variable-length kernel), sdpa, reference.
    """
    output: Tensor = backends.call("attention", backend, q, q, k, v, scale=scale, packing=packing)
    return output

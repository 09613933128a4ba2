"""Attention over depth: the mix of block sums that replaces the residual stream.

Letters: L sources, S sites, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import backends
from .two_phase import bank_phase, merge_running, two_phase

__all__ = ["attn_res", "bank_phase", "merge_running", "two_phase"]


def attn_res(
    sources: Sequence[Tensor],  # L of [..., d], one shape and dtype
    query: Tensor,  # [d]
    norm_weight: Tensor,  # [d]
    *,
    eps: float = 1e-5,
    backend: str = "auto",
) -> Tensor:
    """sum_i a_i v_i with a = softmax_i <query * norm_weight, v_i / rms(v_i)>: [..., d] in the sources' dtype.

    FP32 inside, cast once. Attention Residuals (arXiv:2603.15031); backends: fla, lean, reference.
    """
    assert sources, "attn_res needs at least one source"
    output: Tensor = backends.call("attn_res", backend, sources[0], sources, query, norm_weight, eps)
    return output

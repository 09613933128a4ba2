"""Attention through Transformer Engine, which picks cuDNN's fused kernel on Hopper.

It is the one open kernel here that takes K3's unequal head dims (192 and 128) without padding the values.
Letters: b batch, s sequence, H heads, Dq, Dv head dims.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from ..packing import Packing
from .fragments import Fragments, borders


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, packing: Packing | Fragments
) -> Tensor:
    """See `ops.attention.causal_attention`; the output has v's dtype."""
    attend = _attention(q.shape[2], (q.shape[3], v.shape[3]), scale)
    if packing.whole_rows:
        output = attend(q, k, v, qkv_format="bshd", attn_mask_type="causal")  # [b, s, H*Dv]
    else:
        square = isinstance(packing, Packing)
        queries, keys, most_queries, most_keys = borders(packing)
        output = attend(
            *(x.flatten(0, 1) for x in (q, k, v)),  # [b*s, H, D]
            qkv_format="thd",
            attn_mask_type="padding_causal" if square else "padding_causal_bottom_right",
            cu_seqlens_q=queries,
            cu_seqlens_kv=keys,
            max_seqlen_q=most_queries,
            max_seqlen_kv=most_keys,
            pad_between_seqs=False,
        )
    return output.view(*q.shape[:3], v.shape[-1])


@cache
def _attention(heads: int, head_dims: tuple[int, int], scale: float) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(heads, head_dims, softmax_scale=scale)

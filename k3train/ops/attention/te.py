"""Attention through Transformer Engine, which picks cuDNN's fused kernel on Hopper.

It is the one open kernel here that takes K3's unequal head dims (192 and 128) without padding the values.
Letters: b batch, s sequence, H heads, Dq, Dv head dims.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor

from ..packing import Packing
from .fragments import Fragments, borders
from .pieces import CuDNN, attend_in_pieces


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, packing: Packing | Fragments
) -> Tensor:
    """See `ops.attention.causal_attention`; the output has v's dtype."""
    if packing.whole_rows:
        attend = _attention(q.shape[2], (q.shape[3], v.shape[3]), scale)
        output = attend(q, k, v, qkv_format="bshd", attn_mask_type="causal")  # [b, s, H*Dv]
        return output.view(*q.shape[:3], v.shape[-1])
    if isinstance(packing, Fragments):
        return attend_in_pieces(q, k, v, scale, packing, CuDNN(), partial(_packed, scale))
    return _packed(scale, q, k, v, packing)


def _packed(scale: float, q: Tensor, k: Tensor, v: Tensor, packing: Packing | Fragments) -> Tensor:
    """By the kernel for documents of any length."""
    queries, keys, most_queries, most_keys = borders(packing)
    square = isinstance(packing, Packing)
    output = _attention(q.shape[2], (q.shape[3], v.shape[3]), scale)(
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

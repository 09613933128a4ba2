"""The short causal convolution in front of KDA's queries, keys and values.

Letters: b batch, s sequence, C channels, K kernel size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import backends
from ..packing import Packing
from .halo import halos

__all__ = ["short_conv", "short_convs"]


def short_conv(x: Tensor, weight: Tensor, packing: Packing, backend: str = "auto") -> Tensor:
    """SiLU of a causal depthwise convolution: x [b, s, C], weight [C, 1, K] FP32 -> [b, s, C] in x's dtype.

    FP32 inside; no bias; a document does not see the tokens of the one before. Over a context group the last
    K - 1 columns of the ranks before are fetched. K3 report (arXiv:2607.24653); backends: fla, shift,
    reference.
    """
    return short_convs((x,), (weight,), packing, backend)[0]


def short_convs(
    xs: Sequence[Tensor], weights: Sequence[Tensor], packing: Packing, backend: str = "auto"
) -> tuple[Tensor, ...]:
    """`short_conv` of each of `xs`, which have one shape, with its weight; one exchange for all of them."""
    before = halos(xs, weights[0].shape[-1] - 1, packing)
    return tuple(
        backends.call("short_conv", backend, x, x, weight, packing, halo)
        for x, weight, halo in zip(xs, weights, before, strict=True)
    )

"""The short causal convolution in front of KDA's queries, keys and values.

Letters: b batch, s sequence, C channels, K kernel size.
"""

from __future__ import annotations

from torch import Tensor

from .. import backends
from ..packing import Packing

__all__ = ["short_conv"]


def short_conv(x: Tensor, weight: Tensor, packing: Packing, backend: str = "auto") -> Tensor:
    """SiLU of a causal depthwise convolution: x [b, s, C], weight [C, 1, K] FP32 -> [b, s, C] in x's dtype.

    FP32 inside; no bias; a document does not see the tokens of the one before. K3 report (arXiv:2607.24653);
    backends: fla, shift, reference.
    """
    output: Tensor = backends.call("short_conv", backend, x, x, weight, packing)
    return output

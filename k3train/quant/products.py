"""Where the forward products of quantised experts are computed: in their formats, or emulated.

te: tensor cores take MX blocks (`mx.te`). emulated: the rounded numbers are multiplied in the model's dtype,
which holds each of them exactly. Products of backward are emulated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import QuantConfig
from ..errors import UserError
from ..ops import backends
from .formats import native_refusal

Multiply = Callable[..., Tensor]
"""See `ops.grouped.multiply`."""

OPERATOR = "mx_products"


def resolve(quant: QuantConfig, device_type: str, dtype: torch.dtype) -> Multiply:
    """The function that multiplies rounded rows by rounded weights of `dtype`.

    Raises UserError where `quant.products` asks for what cannot be had; auto is emulated there.
    """
    requested, refusal = quant.products, native_refusal(quant.weight_format, quant.activation_format)
    if requested == "te" and refusal:
        raise UserError(f"quant.products=te: {refusal}; use auto or emulated")
    if requested == "auto" and refusal:
        requested = "emulated"
    multiply: Multiply = backends.resolve(OPERATOR, requested, device_type, dtype).load()
    return multiply

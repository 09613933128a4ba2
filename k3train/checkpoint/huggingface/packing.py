"""Between rows of our tensors and the tensors that hold them in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UserError
from ...quant.mx import MXFP4
from ...quant.mx.reference import decode, encode, pack, unpack
from .keys import Piece

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


def to_stored(piece: Piece, rows: Tensor, rounding: str) -> list[Tensor]:
    """Our rows as the tensors of `piece.stored`; `rounding` is that of MXFP4's scales, see `quant.mx`."""
    if piece.form == "mxfp4":
        codes, scales = encode(rows, MXFP4, rounding)
        return [pack(codes), scales]
    (stored,) = piece.stored
    values = rows.to(TORCH_DTYPES[stored.dtype])
    if piece.form == "padded":
        values = torch.cat((values, values.new_zeros(stored.shape[0] - len(values))))
    return [values.reshape(stored.shape)]


def from_stored(piece: Piece, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The tensors of `piece.stored` as our rows; packed ones in `dtype`, which holds them exactly.

    Raises:
        UserError: what should be padding is not zero.
    """
    if piece.form == "mxfp4":
        codes, scales = tensors
        return decode(unpack(codes), scales, MXFP4, dtype)
    (values,) = tensors
    if piece.form == "padded":
        used = piece.shape[0]
        if values[used:].any():
            raise UserError(f"{piece.stored[0].key} has {used} heads and numbers other than 0 behind them")
        values = values[:used]
    return values.reshape(piece.shape)

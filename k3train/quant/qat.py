"""Quantisation-aware training of routed experts: products see weights and rows as a released model has them.

Rounding is invisible to gradients (straight-through, clipped values included); products of backward use the
same rounded weights and rows as those of forward. Parameters, their gradients and their optimizer states are
untouched. Kimi K3 report (arXiv:2607.24653). Letters: P weights, n rows, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..config import QuantConfig
from . import mx
from .products import Multiply, resolve


class ExpertQuantiser:
    """How all routed experts of a rank are seen; a `parallel.moonep.Codec`.

    Args:
        device_type, dtype: of rows and weights.

    Raises:
        UserError: `quant.products` cannot be had on them.
    """

    def __init__(self, quant: QuantConfig, device_type: str, dtype: torch.dtype) -> None:
        self.multiply: Multiply = resolve(quant, device_type, dtype)
        """Forward products of what `rows` and `weights` give."""
        self.weight_format = mx.FORMATS[quant.weight_format]
        self.row_format = mx.FORMATS.get(quant.activation_format)
        self._rounding, self._backend, self._hold = quant.scale_rounding, quant.backend, quant.hold_weights
        self._held: dict[tuple[str, int], Sequence[Tensor]] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """While it lasts the caller changes no weight, so that what is made of weights may be kept."""
        self._held = {} if self._hold else None
        try:
            yield
        finally:
            self._held = None

    def rows(self, rows: Tensor) -> Tensor:
        """Rows [n, i] as products see them; differentiable, straight through."""
        if self.row_format is None:
            return rows
        seen: Tensor = _StraightThrough.apply(rows, partial(self._quantised, self.row_format))
        return seen

    def weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Weights [o, i] as products see them, side by side in one storage; without a gradient."""
        return self._kept("weights", weights, partial(self._quantised, self.weight_format))

    def pack(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Bytes of each weight: its codes, then its scales; 4.25 bits a value in MXFP4."""
        return self._kept("packed", weights, self._packed)

    def unpack(self, packed: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
        """What `weights` gives, bit for bit, of the bytes that `pack` made."""
        if not packed:
            return []
        together, places = _together(packed)
        values = mx.from_bytes(together, like.shape, self.weight_format, like.dtype, backend=self._backend)
        return [values[place] for place in places]

    def nbytes(self, weight: Tensor) -> int:
        """Bytes of what `pack` makes of a weight."""
        return int(weight.numel() * self.weight_format.bits_per_value) // 8

    def _quantised(self, fmt: mx.Format, x: Tensor) -> Tensor:
        return mx.fake_quantise(x, fmt, self._rounding, backend=self._backend)

    def _packed(self, weights: Tensor) -> Tensor:
        return mx.to_bytes(weights, self.weight_format, self._rounding, backend=self._backend)

    @torch.no_grad()
    def _kept(
        self, what: str, weights: Sequence[Tensor], make: Callable[[Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """make([P, ...]) cut into one for each weight, made anew unless it is held."""
        key = what, weights[0].data_ptr()
        if self._held is not None and key in self._held:
            return self._held[key]
        together, places = _together(weights)
        made = make(together)
        if self._held is None:
            return [made[place] for place in places]
        # Side by side in the right order, they reach grouped products without a copy.
        found = list(made if places == sorted(places) else made[places])
        self._held[key] = found
        return found


def _together(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Tensors of one shape as [P, ...] and the place of each: without a copy where they lie evenly apart.

    megatron-core's buffers hold parameters back to front.
    """
    offsets = [tensor.storage_offset() for tensor in tensors]
    order = sorted(range(len(tensors)), key=offsets.__getitem__)
    first = tensors[order[0]].detach()
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    steps = {offsets[after] - offsets[before] for before, after in pairwise(order)} or {first.numel()}
    whole = all(tensor.is_contiguous() for tensor in tensors)
    if len(storages) > 1 or len(steps) > 1 or not whole:
        return torch.stack([tensor.detach() for tensor in tensors]), list(range(len(tensors)))
    places = sorted(range(len(tensors)), key=order.__getitem__)
    return first.as_strided((len(tensors), *first.shape), (steps.pop(), *first.stride())), places


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, quantise: Callable[[Tensor], Tensor]) -> Tensor:
        return quantise(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None

"""What the experts' products see of rows and weights, and the form in which weights travel: handed in.

`EXACT` leaves all as it is. A codec that rounds gives the same bits each time, at home and on other ranks:
a borrowed expert computes what it would at home. Letters: n rows, i inputs, o outputs of a weight [o, i].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """How experts are stored and seen. Gradients pass it unchanged. Zeros stay zeros."""

    def rows(self, rows: Tensor) -> Tensor:
        """What a product sees of its rows [n, i]; differentiable."""
        ...

    def weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """What products see of weights [o, i], all of one shape; without a gradient."""
        ...

    def pack(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """What travels of each weight: contiguous tensors of one shape and dtype."""
        ...

    def unpack(self, packed: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
        """What `weights` gives, bit for bit, of weights that came packed; each like `like`."""
        ...

    def nbytes(self, weight: Tensor) -> int:
        """Bytes that travel of such a weight."""
        ...


class Exact:
    """Everything as it is."""

    def rows(self, rows: Tensor) -> Tensor:
        """The rows themselves."""
        return rows

    def weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights themselves."""
        return weights

    def pack(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights themselves."""
        return weights

    def unpack(self, packed: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
        """The weights themselves."""
        return packed

    def nbytes(self, weight: Tensor) -> int:
        """All of it."""
        return weight.nbytes


EXACT = Exact()

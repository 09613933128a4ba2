"""Rows sorted by group, one group for each weight. Letters: n rows, G groups, i inputs, o outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .cost import Load


@dataclass(frozen=True)
class Segments:
    """Which rows belong to which weight; empty groups are allowed.

    `counts`: rows of each group, padding included, known to the host; they add up to n.
    `ends`: int32 [G], the running sum of `counts`, on the device of the rows.
    """

    counts: list[int]
    ends: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device | str = "cpu") -> Segments:
        """Segments whose ends are copied to `device`."""
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        return cls(list(counts), ends.to(device, non_blocking=True))

    @cached_property
    def borders(self) -> list[int]:
        """First row of each group, and n: G + 1 numbers."""
        return [0, *accumulate(self.counts)]

    @cached_property
    def filled(self) -> list[int]:
        """The groups that have rows, ascending."""
        return [group for group, count in enumerate(self.counts) if count]

    @cached_property
    def load(self) -> Load:
        """What the cost model wants to know."""
        return Load.of(self.counts)

    def order(self, largest_first: bool) -> list[int]:
        """The groups that have rows, in the order of their launch."""
        if not largest_first:
            return self.filled
        return sorted(self.filled, key=self.counts.__getitem__, reverse=True)

    def piece(self, rows: Tensor, group: int) -> Tensor:
        """The group's part of rows [n, ...], without a copy."""
        return rows[self.borders[group] : self.borders[group + 1]]

    def offsets(self, first: int, last: int) -> Tensor:
        """Ends of the groups first .. last - 1, counted from the first of them: int32 on the device."""
        if (first, last) == (0, len(self.counts)):
            return self.ends
        start = self.borders[first]
        return self.ends[first:last] - start if start else self.ends[first:last]


class Products(NamedTuple):
    """The three matrix products of one backend.

    The last argument of each is the order in which to launch the groups that have rows; a backend that
    launches all at once ignores it. It changes no result.
    """

    multiply: Callable[[Tensor, Sequence[Tensor], Segments, list[int]], Tensor]
    input_gradient: Callable[[Tensor, Sequence[Tensor], Segments, list[int]], Tensor]
    weight_gradients: Callable[[Tensor, Tensor, Segments, list[int]], list[Tensor | None]]

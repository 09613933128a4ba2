"""Images and clips packed one behind another.

Letters: n items, L patches of all items. A grid is (t, h, w): frames, rows and columns of patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from ..vision_shapes import Grid, patches


@dataclass(frozen=True, eq=False)
class Items:
    """Where items begin and end in a pack; no operator looks across their borders.

    Everything but `cu_seqlens` lives on the host, so that no operator waits for the device.
    """

    grids: tuple[Grid, ...]
    device: torch.device

    @classmethod
    def pack(cls, grids: Sequence[Grid], device: torch.device) -> Items:
        """Items in the order in which their patches lie, each with its patches in the order (t, h, w)."""
        return cls(tuple((int(t), int(h), int(w)) for t, h, w in grids), device)

    @cached_property
    def lengths(self) -> list[int]:
        """Patches of each item."""
        return [patches(grid) for grid in self.grids]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Borders of the items: [n + 1] int32 on the device."""
        borders = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        if self.device.type == "cuda":
            return borders.pin_memory().to(self.device, non_blocking=True)
        return borders

    @cached_property
    def grid_runs(self) -> list[tuple[Grid, int]]:
        """(grid, how many) of each run of neighbours with equal grids, which are worked on together."""
        return [(grid, len(list(run))) for grid, run in groupby(self.grids)]

    @cached_property
    def length_runs(self) -> list[tuple[int, int]]:
        """(patches, how many) of each run of neighbours with equally many patches."""
        return [(length, len(list(run))) for length, run in groupby(self.lengths)]

    def split(self, x: Tensor) -> list[tuple[Grid, Tensor]]:
        """Cut x [L, ...] into (grid, [count, patches, ...]) by `grid_runs`."""
        sizes = [patches(grid) * count for grid, count in self.grid_runs]
        parts = x.split(sizes)
        return [
            (grid, part.unflatten(0, (count, patches(grid))))
            for (grid, count), part in zip(self.grid_runs, parts, strict=True)
        ]

    def spread(self, tables: Sequence[Tensor]) -> Tensor:
        """Repeat a table [patches, ...] of each run for its items and join them: [L, ...]."""
        return torch.cat(
            [
                table.expand(count, *table.shape).flatten(0, 1)
                for table, (_, count) in zip(tables, self.grid_runs, strict=True)
            ]
        )

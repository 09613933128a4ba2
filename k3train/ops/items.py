"""Images and clips packed one behind another, whole or in pieces.

Letters: n items, L patches of all pieces, K keys of all items of which there is a piece. A grid is (t, h, w):
frames, rows and columns of patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import Tensor

from ..vision_context import Assignment, KeyPlan, Piece, key_plan
from ..vision_shapes import Grid


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's part of items that are spread over a context group."""

    assignment: Assignment
    group: dist.ProcessGroup

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank has, in the order of the items; with nothing, no row of the first one."""
        rank = self.group.rank()
        found = tuple(piece for _, piece in self.assignment.pieces(rank))
        return found or (Piece(self.assignment.grids[0], 0, 0),)

    @cached_property
    def plan(self) -> KeyPlan | None:
        """How keys and values travel; None where no rank has a part of an item."""
        return key_plan(self.assignment, self.group.rank()) if self.assignment.is_cut else None


@dataclass(frozen=True, eq=False)
class Items:
    """Where pieces of items begin and end in a pack; no operator looks across the borders of an item.

    Everything but the borders for kernels lives on the host, so that no operator waits for the device.
    """

    pieces: tuple[Piece, ...]
    device: torch.device
    share: Share | None = None
    """Of items that lie on several ranks; None: all are whole."""

    @classmethod
    def pack(cls, grids: Sequence[Grid], device: torch.device) -> Items:
        """Whole items in the order in which their patches lie, patches of each in the order (t, h, w)."""
        return cls(tuple(Piece((int(t), int(h), int(w)), 0, int(h)) for t, h, w in grids), device)

    @classmethod
    def of(cls, share: Share, device: torch.device) -> Items:
        """This rank's pieces, patches of each in the order (t, h, w)."""
        return cls(share.pieces, device, share)

    @cached_property
    def lengths(self) -> list[int]:
        """Patches of each piece."""
        return [piece.patches for piece in self.pieces]

    @cached_property
    def key_lengths(self) -> list[int]:
        """Patches that the queries of each piece look at: those of the whole item."""
        plan = self.share.plan if self.share is not None else None
        if plan is None or not plan.lengths:
            return self.lengths
        return list(plan.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Borders of the pieces: [n + 1] int32 on the device."""
        return self._borders(self.lengths)

    @cached_property
    def cu_keys(self) -> Tensor:
        """Borders of the items in their keys: [n + 1] int32 on the device."""
        return self.cu_seqlens if self.key_lengths is self.lengths else self._borders(self.key_lengths)

    @cached_property
    def runs(self) -> list[tuple[Piece, int]]:
        """(piece, how many) of each run of neighbours with equal pieces, which are worked on together."""
        return [(piece, len(list(run))) for piece, run in groupby(self.pieces)]

    @cached_property
    def length_runs(self) -> list[tuple[tuple[int, int], int]]:
        """((patches, keys), how many) of each run of neighbours with equally many."""
        both = zip(self.lengths, self.key_lengths, strict=True)
        return [(lengths, len(list(run))) for lengths, run in groupby(both)]

    def split(self, x: Tensor) -> list[tuple[Grid, Tensor]]:
        """Cut x [L, ...] into (grid of the piece, [count, patches, ...]) by `runs`."""
        parts = x.split([piece.patches * count for piece, count in self.runs])
        return [
            (piece.local, part.unflatten(0, (count, piece.patches)))
            for (piece, count), part in zip(self.runs, parts, strict=True)
        ]

    def spread(self, tables: Sequence[Tensor]) -> Tensor:
        """Repeat a table [patches, ...] of each run for its pieces and join them: [L, ...]."""
        return torch.cat(
            [
                table.expand(count, *table.shape).flatten(0, 1)
                for table, (_, count) in zip(tables, self.runs, strict=True)
            ]
        )

    def _borders(self, lengths: Sequence[int]) -> Tensor:
        borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        if self.device.type == "cuda":
            return borders.pin_memory().to(self.device, non_blocking=True)
        return borders

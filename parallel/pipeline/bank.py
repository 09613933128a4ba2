"""The rows of a growing bank on one rank: kept between its chunks, sent once, gradients sent back once.

A stage reads the rows made by earlier stages and a running tensor, all of one shape [s, b, d], and passes
them on. What crosses ranks is one tensor, the new rows and the running one side by side: [s, b, width * d].

Every use of a kept row is a leaf of its own, so that each chunk's graph ends at its own borders. The leaves'
gradients gather per row until the backward of the stage where the row arrived, which sends them back with the
row's own, or of the stage that made it, which adds them to what it differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .rows import RowPlan

Key = tuple[int, int]
"""(micro-batch, row)"""


class RowBank:
    """Rows of the micro-batches in flight on one pipeline rank."""

    def __init__(
        self, plan: RowPlan, rank: int, hold: Callable[[Tensor], Callable[[], Tensor]] | None = None
    ) -> None:
        """`hold` keeps a row until a later chunk asks for it; without, it stays where it is."""
        self.plan, self.rank = plan, rank
        self._hold = hold or _at_hand
        self._rows: dict[Key, Callable[[], Tensor]] = {}
        self._gradients: dict[Key, Tensor] = {}
        self._leaves: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        self._constant: set[Key] = set()

    def enter(self, stage: int, microbatch: int, payload: Tensor) -> list[Tensor]:
        """The sources of a stage: every row before it and the running tensor.

        Args:
            payload: what arrived, a leaf [s, b, width * d].
        """
        arriving = self.plan.arriving(stage)
        *rows, running = payload.chunk(self.plan.width(stage), dim=-1)
        leaves = [(row, self._leaf(microbatch, row, payload)) for row in range(arriving.start)]
        self._leaves[stage, microbatch] = leaves
        if self._is_read_again(stage):
            for row, tensor in zip(arriving, rows, strict=True):
                self._rows[microbatch, row] = self._hold(tensor.detach())
        return [*(leaf for _, leaf in leaves), *rows, running]

    def leave(self, stage: int, microbatch: int, sources: Sequence[Tensor]) -> Tensor:
        """The message into the next stage, from the sources behind this one."""
        if self._is_read_again(stage):
            for row in self.plan.created(stage):
                self._keep(microbatch, row, sources[row])
        travelling = self.plan.arriving(stage + 1)
        return torch.cat([*(sources[row] for row in travelling), sources[-1]], dim=-1)

    def collect(self, stage: int, microbatch: int, gradient: Tensor | None) -> None:
        """After a stage's backward: gather its leaves' gradients, complete the message that goes back.

        Args:
            gradient: that of the payload, [s, b, width * d], changed in place; None at the first stage.
        """
        for row, leaf in self._leaves.pop((stage, microbatch), []):
            if leaf.grad is not None:
                self._add(microbatch, row, leaf.grad)
        if gradient is not None:
            parts = gradient.chunk(self.plan.width(stage), dim=-1)
            for row, part in zip(self.plan.arriving(stage), parts[:-1], strict=True):
                if (gathered := self._gradients.pop((microbatch, row), None)) is not None:
                    part += gathered
        if stage < self.plan.layout.pipeline:
            self.forget(microbatch)
            stray = [row for number, row in self._gradients if number == microbatch]
            assert not stray, f"gradients of rows {stray} of micro-batch {microbatch} went nowhere"

    def leaves(self, stage: int, microbatch: int) -> list[Tensor]:
        """The rows that a stage has read, whose gradients its `collect` will gather."""
        return [leaf for _, leaf in self._leaves.get((stage, microbatch), [])]

    def forget(self, microbatch: int) -> None:
        """Let go of a micro-batch's rows."""
        for key in [key for key in self._rows if key[0] == microbatch]:
            del self._rows[key]
        self._constant = {key for key in self._constant if key[0] != microbatch}
        for place in [place for place in self._leaves if place[1] == microbatch]:
            del self._leaves[place]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight."""
        return not (self._rows or self._gradients or self._leaves)

    def _is_read_again(self, stage: int) -> bool:
        _, chunk = self.plan.layout.home(stage)
        return self.plan.cache and chunk + 1 < self.plan.layout.virtual

    def _leaf(self, microbatch: int, row: int, payload: Tensor) -> Tensor:
        return self._rows[microbatch, row]().detach().requires_grad_(payload.requires_grad)

    def _keep(self, microbatch: int, row: int, tensor: Tensor) -> None:
        self._rows[microbatch, row] = self._hold(tensor.detach())
        if not tensor.requires_grad:
            self._constant.add((microbatch, row))
        else:

            def complete(gradient: Tensor) -> Tensor:
                gathered = self._gradients.pop((microbatch, row), None)
                return gradient if gathered is None else gradient + gathered

            tensor.register_hook(complete)

    def _add(self, microbatch: int, row: int, gradient: Tensor) -> None:
        key = microbatch, row
        if key in self._constant:
            return
        held = self._gradients.get(key)
        self._gradients[key] = gradient if held is None else held + gradient


def _at_hand(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def forget_values(leaves: Sequence[Tensor]) -> None:
    """Let leaves go on collecting gradients without holding the memory of their values."""
    for leaf in leaves:
        # One element, of the same shape and dense in no dimension: autograd takes a gradient's own layout.
        leaf.data = leaf.new_empty(1).expand(leaf.shape)

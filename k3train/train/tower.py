"""The vision tower in a step: which images it runs in which part, and how its gradients are summed.

Under context parallelism the ranks of a context group run every part together: they share out its images
(`vision_context`), and each gives every other the features of that one's columns.

Letters: n tokens that the images of a part become, d hidden, N context ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from parallel.context.exchange import exchange_rows

from ..ops.items import Share
from ..ops.packing import Span
from ..schedule import Bundles
from ..vision_config import VisionConfig
from ..vision_context import Piece, assign
from ..vision_shapes import Grid, check_grids, patches, tokens, train_flops


class Tower:
    """The tower of this rank, as the pipeline's executor calls it (`parallel.pipeline.runtime.Tower`)."""

    def __init__(
        self,
        vision: VisionConfig,
        model: DistributedDataParallel,
        group: dist.ProcessGroup,
        out_size: int,
        context: dist.ProcessGroup | None = None,
        price: float = 0.0,
    ) -> None:
        """`group`: the pipeline ranks, each of which holds the tower and runs some of the images.

        Args:
            context: ranks that run each part together; None: this one alone.
            price: of keys and values, see `vision_context.assign`.
        """
        self.vision, self.model, self.group, self.out_size = vision, model, group, out_size
        self.context = context if context is not None and context.size() > 1 else None
        self.price = price
        self._reductions: list[Any] = []
        self._batches: Sequence[dict[str, Any]] = ()
        self._bundles: Bundles = []
        self._parts: list[list[Part]] = []
        self.running = 0
        """Micro-batch whose images went through the tower last."""
        self.flops = 0.0
        """Model FLOPs of forward and backward of the last step's images, recomputation not counted: of whole
        images, so that of the ranks of a pipeline and a context group one reports them."""
        self.imbalance = 1.0
        """Of the last step's parts, the largest loads of context ranks over the mean ones."""

    def load(self, batches: Sequence[dict[str, Any]], bundles: Bundles) -> None:
        """Take the images of a step, and note in each batch where the features, part by part, belong.

        Batches are those of whole rows: grids, patches and image_positions, int64 places in the flattened
        rows, by context ranks best left on the host; `feature_positions` are places in this rank's columns.
        """
        self._batches, self._bundles = batches, bundles
        grids = [grid for batch in batches for grid in batch["grids"]]
        self.flops = train_flops(self.vision, self.out_size, grids)
        if self.context is not None:
            self._load_parts(self.context, batches, bundles)
            return
        for batch, parts in zip(batches, bundles, strict=True):
            pieces = self._by_item(batch, batch["image_positions"])
            order = [item for part in parts for item in part]
            batch["feature_positions"] = torch.cat([pieces[item] for item in order]) if order else None

    def unload(self) -> None:
        """Let go of the images."""
        self._batches, self._bundles, self._parts = (), [], []

    def shape(self, microbatch: int, part: int) -> tuple[int, int]:
        """[n, d] of the features of a part, of those in this rank's columns."""
        if self.context is not None:
            return self._parts[microbatch][part].route.positions.numel(), self.out_size
        grids = self._grids(microbatch, part)
        return sum(tokens(self.vision, grid) for grid in grids), self.out_size

    def forward(self, microbatch: int, part: int) -> Tensor:
        """Features [n, d] of a part; a collective of the context group."""
        self.running = microbatch
        batch = self._batches[microbatch]
        sizes = [patches(grid) for grid in batch["grids"]]
        pieces = batch["patches"].split(sizes)
        chosen = [pieces[item] for item in self._bundles[microbatch][part]]
        grids = self._grids(microbatch, part)
        if self.context is not None:
            return self._together(self._parts[microbatch][part], chosen, grids)
        features: Tensor = self.model(torch.cat(chosen), grids)
        return features

    def reduce(self) -> None:
        """Start summing the gradients over the pipeline ranks; their data-parallel sum follows."""
        self._reductions = [
            dist.all_reduce(buffer.grad_data, group=self.group, async_op=True)
            for buffer in self.model.buffers
            if self.group.size() > 1
        ]

    def finish(self, scale: Tensor) -> None:
        """Wait for that sum, take the one over data-parallel and context ranks, and scale the result."""
        for work in self._reductions:
            work.wait()
        self._reductions = []
        self.model.finish_grad_sync()
        self.model.scale_gradients(scale)

    def _grids(self, microbatch: int, part: int) -> list[Grid]:
        grids = self._batches[microbatch]["grids"]
        return [grids[item] for item in self._bundles[microbatch][part]]

    def _by_item(self, batch: dict[str, Any], positions: Tensor) -> Sequence[Tensor]:
        """Places of features, split by item."""
        return positions.split([tokens(self.vision, grid) for grid in batch["grids"]])

    def _load_parts(
        self, context: dist.ProcessGroup, batches: Sequence[dict[str, Any]], bundles: Bundles
    ) -> None:
        self._parts = []
        for batch, parts in zip(batches, bundles, strict=True):
            check_grids(self.vision, batch["grids"], batch["patches"].shape[0])
            places = self._by_item(batch, batch["image_positions"].cpu())
            self._parts.append([self._part(context, batch, places, part) for part in parts])
            found = [part.route.positions for part in self._parts[-1]]
            batch["feature_positions"] = torch.cat(found) if found else None
        loads = [part.share.assignment.loads for row in self._parts for part in row]
        mean = sum(map(sum, loads)) / context.size()
        self.imbalance = sum(map(max, loads)) / mean if loads else 1.0

    def _part(
        self,
        context: dist.ProcessGroup,
        batch: dict[str, Any],
        places: Sequence[Tensor],
        items: Sequence[int],
    ) -> Part:
        grids = [batch["grids"][item] for item in items]
        assignment = assign(self.vision, self.out_size, grids, context.size(), self.price)
        positions = torch.cat([places[item] for item in items])
        counts = torch.tensor(assignment.tokens(self.vision.merge))
        route = Route.of(positions, counts, batch["packing"].span, batch["patches"].device)
        return Part(Share(assignment, context), route)

    def _together(self, part: Part, items: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        """Features [n, d] in this rank's columns, of items [patches, p] on which all ranks work."""
        context, route = part.share.group, part.route
        own = part.share.assignment.pieces(context.rank())
        rows = [_cut(items[item], piece) for item, piece in own] or [items[0][:0]]
        features: Tensor = self.model(torch.cat(rows), grids, part.share)
        if route.order is not None:
            features = features[route.order]
        return exchange_rows(features, route.send, route.receive, context, name="vision.features")


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a micro-batch's images as a context rank runs it."""

    share: Share
    route: Route


@dataclass(frozen=True, eq=False)
class Route:
    """From the ranks that make features to those in whose columns they belong, seen by one of them."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    order: Tensor | None
    """int64: this rank's own features in the order in which they are sent; None: as they are."""
    positions: Tensor
    """int64 [n]: places of what it receives, in the order in which it comes, in its flattened columns."""

    @classmethod
    def of(cls, positions: Tensor, counts: Tensor, span: Span, device: torch.device) -> Route:
        """Of features, item by item, at `positions` of the flattened whole rows; all given on the host.

        Args:
            counts: [items, N]: how many features of each item each rank makes, one rank after another.
            device: of the features.
        """
        ranks, rank, length = span.size, span.rank, span.starts[-1]
        rows, columns = positions // length, positions % length
        source = torch.arange(ranks).repeat(len(counts)).repeat_interleave(counts.flatten())
        target = torch.bucketize(columns, torch.tensor(span.starts[1:-1]), right=True)
        table = torch.bincount(source * ranks + target, minlength=ranks**2).view(ranks, ranks)
        own = target[source == rank]
        order = own.argsort(stable=True)
        come = (target == rank).nonzero().flatten()
        come = come[source[come].argsort(stable=True)]
        here = rows[come] * (span.stop - span.start) + columns[come] - span.start
        return cls(
            send=tuple(table[rank].tolist()),
            receive=tuple(table[:, rank].tolist()),
            order=None if bool((own.diff() >= 0).all()) else order.to(device),
            positions=here.to(device),
        )


def _cut(patches: Tensor, piece: Piece) -> Tensor:
    """Rows of a piece out of an item [t * h * w, p]: a contiguous view of each frame, joined."""
    whole = patches.unflatten(0, piece.grid)[:, piece.first : piece.stop]
    return whole.flatten(0, 2)

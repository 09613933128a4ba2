"""The vision tower in a step: which images it runs in which part, and how its gradients are summed.

Letters: n tokens that the images of a part become, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from ..schedule import Bundles
from ..vision_config import VisionConfig
from ..vision_shapes import Grid, patches, tokens, train_flops


class Tower:
    """The tower of this rank, as the pipeline's executor calls it (`parallel.pipeline.runtime.Tower`)."""

    def __init__(
        self, vision: VisionConfig, model: DistributedDataParallel, group: dist.ProcessGroup, out_size: int
    ) -> None:
        """`group`: the pipeline ranks, each of which holds the tower and runs some of the images."""
        self.vision, self.model, self.group, self.out_size = vision, model, group, out_size
        self._reductions: list[Any] = []
        self._batches: Sequence[dict[str, Any]] = ()
        self._bundles: Bundles = []
        self.running = 0
        """Micro-batch whose images went through the tower last."""
        self.flops = 0.0
        """Model FLOPs of forward and backward of the last step's images, recomputation not counted."""

    def load(self, batches: Sequence[dict[str, Any]], bundles: Bundles) -> None:
        """Take the images of a step, and note in each batch where the features, part by part, belong."""
        self._batches, self._bundles = batches, bundles
        grids = [grid for batch in batches for grid in batch["grids"]]
        self.flops = train_flops(self.vision, self.out_size, grids)
        for batch, parts in zip(batches, bundles, strict=True):
            sizes = [tokens(self.vision, grid) for grid in batch["grids"]]
            pieces = batch["image_positions"].split(sizes)
            order = [item for part in parts for item in part]
            batch["feature_positions"] = torch.cat([pieces[item] for item in order]) if order else None

    def unload(self) -> None:
        """Let go of the images."""
        self._batches, self._bundles = (), []

    def shape(self, microbatch: int, part: int) -> tuple[int, int]:
        """[n, d] of the features of a part."""
        grids = self._grids(microbatch, part)
        return sum(tokens(self.vision, grid) for grid in grids), self.out_size

    def forward(self, microbatch: int, part: int) -> Tensor:
        """Features [n, d] of a part."""
        self.running = microbatch
        batch = self._batches[microbatch]
        sizes = [patches(grid) for grid in batch["grids"]]
        pieces = batch["patches"].split(sizes)
        chosen = [pieces[item] for item in self._bundles[microbatch][part]]
        features: Tensor = self.model(torch.cat(chosen), self._grids(microbatch, part))
        return features

    def reduce(self) -> None:
        """Start summing the gradients over the pipeline ranks; their data-parallel sum follows."""
        self._reductions = [
            dist.all_reduce(buffer.grad_data, group=self.group, async_op=True)
            for buffer in self.model.buffers
            if self.group.size() > 1
        ]

    def finish(self, scale: Tensor) -> None:
        """Wait for that sum, take the one over the data-parallel ranks, and scale the result."""
        for work in self._reductions:
            work.wait()
        self._reductions = []
        self.model.finish_grad_sync()
        self.model.scale_gradients(scale)

    def _grids(self, microbatch: int, part: int) -> list[Grid]:
        grids = self._batches[microbatch]["grids"]
        return [grids[item] for item in self._bundles[microbatch][part]]

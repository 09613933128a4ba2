"""Writes down how tokens were routed in some steps, for the replay of real loads.

Letters: R expert-parallel ranks, M micro-batches, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import Groups

from ..model.decoder import LanguageModelChunk
from ..model.moe import LatentMoE


class RoutingTrace:
    """Counts of entries of each rank and expert, one line for each layer and micro-batch.

    `routing-STAGE.jsonl` of the run's folder has the layers of one pipeline rank, of the first group of
    expert-parallel ranks: {"layer": 3, "step": 2, "microbatch": 0, "counts": [[...], ...]}, where
    counts[r][e] are the entries that rank r sent to expert e of the model. The MTP layer has the number of
    decoder layers.
    """

    def __init__(
        self, models: list[LanguageModelChunk], groups: Groups, folder: Path, *, first: int, steps: int
    ) -> None:
        """Trace `steps` steps from `first` on; 0 traces none."""
        self.layers = [named for model in models for named in model.moe_layers()] if steps else []
        self.groups = groups
        self._steps = range(first, first + steps)
        collection = groups.pg_collection
        self._writes = collection.ep.rank() == 0 and collection.expt_dp.rank() == 0
        self._path = folder / f"routing-{collection.pp.rank()}.jsonl"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the block's training step if it is one of the chosen; a collective then."""
        if number not in self._steps:
            yield
            return
        for _, layer in self.layers:
            layer.router.traced = []
        try:
            yield
            lines = [line for name, layer in self.layers for line in self._lines(name, layer, number)]
        finally:
            for _, layer in self.layers:
                layer.router.traced = None
        if self._writes and lines:
            with self._path.open("w" if number == self._steps.start else "a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _lines(self, name: str, layer: LatentMoE, step: int) -> list[dict[str, object]]:
        assert layer.router.traced is not None
        counts = _gather(torch.stack(layer.router.traced), self.groups.pg_collection.ep)  # [R, M, E]
        _, _, index = name.partition("_")
        number = int(index) if index else layer.config.num_layers
        return [
            {"layer": number, "step": step, "microbatch": microbatch, "counts": rows}
            for microbatch, rows in enumerate(counts.transpose(0, 1).tolist())
        ]


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return torch.stack(gathered)

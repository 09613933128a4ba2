"""One checkpoint to load from the parts that several nodes have: each node gets the files its ranks read.

A node reads its own files where they lie and is sent the others, whole. All calls here are collectives.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from . import folders, shards
from .local import LocalDisk
from .places import PART_TABLE, REPORTS
from .shards import Report
from .tensors import overlap
from .unpickling import read_table

COMMON = "common_state"
"""megatron-core reads it before anything else, on every rank."""
SEND_BYTES = 64 << 20


class Stage:
    """A folder on this node's disk that looks like the whole checkpoint and has what was fetched."""

    def __init__(self, disk: LocalDisk, part: Path, device: torch.device) -> None:
        """`part` is this node's folder of the step, which may be absent."""
        self.disk, self.device = disk, device
        self.folder = disk.root / f"loading{folders.PARTIAL}"
        self._own = set(_reported(part))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, _described(part) if disk.leads else ({}, None))
        reports = {number: report for found, _ in gathered for number, report in found.items()}
        table = next(table for _, table in gathered if table is not None)
        if disk.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            for name in self._own:
                (self.folder / name).symlink_to(part / name)
            described = read_table(io.BytesIO(table), part / PART_TABLE)
            shards.complete(self.folder, described, map(Report.of, reports.values()))
        dist.barrier()
        with (self.folder / ".metadata").open("rb") as file:
            self.metadata = read_table(file, self.folder / ".metadata")
        assert self.metadata.storage_data is not None
        self._files = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): info.relative_path
            for index, info in self.metadata.storage_data.items()
        }
        self.fetch({path for (name, _), path in self._files.items() if name.startswith(COMMON)})

    def fetch(self, names: set[str]) -> None:
        """Bring files that this rank needs, whichever node has them, to its node."""
        wanted: list[Any] = [None] * dist.get_world_size()
        present = {path.name for path in self.folder.iterdir()}
        dist.all_gather_object(wanted, (names - present, self._own))
        for name in sorted(set().union(*(missing for missing, _ in wanted))):
            owner = next(rank for rank, (_, held) in enumerate(wanted) if name in held)
            here = any(name in wanted[rank][0] for rank in self.disk.ranks)
            self._send(name, owner, keep=here and self.disk.leads)
        dist.barrier()

    def _send(self, name: str, owner: int, *, keep: bool) -> None:
        """One rank reads a file out to all; `keep` writes it into this node's stage."""
        rank, path = dist.get_rank(), self.folder / name
        size = torch.tensor([path.stat().st_size if rank == owner else 0], device=self.device)
        dist.broadcast(size, src=owner)
        source = path.open("rb") if rank == owner else None
        target = path.open("wb") if keep else None
        for start in range(0, int(size), SEND_BYTES):
            buffer = torch.empty(min(SEND_BYTES, int(size) - start), dtype=torch.uint8, device=self.device)
            if source is not None:
                buffer.copy_(torch.frombuffer(bytearray(source.read(buffer.numel())), dtype=torch.uint8))
            dist.broadcast(buffer, src=owner)
            if target is not None:
                target.write(buffer.cpu().numpy().tobytes())
        for file in (source, target):
            if file is not None:
                file.close()

    def needed(self, state: dict[str, Any]) -> set[str]:
        """Files that hold something of a sharded state of tensors and objects."""
        found: set[str] = set()
        for entry in nested_values(state):
            if isinstance(entry, ShardedObject):
                found.add(self._files[entry.unique_key, None])
            elif isinstance(entry, ShardedTensor):
                described = self.metadata.state_dict_metadata[entry.key]
                assert isinstance(described, TensorStorageMetadata)
                shape = (*[1] * entry.prepend_axis_num, *entry.local_shape)
                found |= {
                    self._files[entry.key, tuple(chunk.offsets)]
                    for chunk in described.chunks
                    if overlap(entry.global_offset, shape, chunk)
                }
        return found


class StagedLoad(TorchDistLoadShardedStrategy):
    """megatron-core's loading, behind the fetching of what it will read."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def load(self, sharded_state_dict: dict[str, Any], *rest: Any, **named: Any) -> dict[str, Any]:
        """As megatron-core's; a collective."""
        self.stage.fetch(self.stage.needed(sharded_state_dict))
        loaded: dict[str, Any] = super().load(sharded_state_dict, *rest, **named)
        return loaded


@contextmanager
def staged(disk: LocalDisk, step: int, device: torch.device) -> Iterator[Stage]:
    """A step's parts on all nodes as one checkpoint, while it lasts."""
    stage = Stage(disk, folders.complete(disk.root, step), device)
    try:
        yield stage
        dist.barrier()
    finally:
        if disk.leads:
            shutil.rmtree(stage.folder, ignore_errors=True)


def _described(part: Path) -> tuple[dict[int, dict[str, Any]], bytes | None]:
    """The plain reports of a node's part, and the table of all tensors where the node has it."""
    if not (part / REPORTS).is_file():
        return {}, None
    plain = json.loads((part / REPORTS).read_text())
    table = part / PART_TABLE
    return {
        int(rank): report for rank, report in plain.items()
    }, table.read_bytes() if table.is_file() else None


def _reported(part: Path) -> list[str]:
    """Names of the data files of a node's part."""
    return [name for report in _described(part)[0].values() for name in report["files"]]

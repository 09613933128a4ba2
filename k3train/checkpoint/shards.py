"""One rank's share of a save: planned together by all ranks, written alone.

megatron-core plans the save and writes the files. Its own asynchronous save would fork or spawn processes,
which survive a killed trainer and need a guarded main module; here a thread writes a copy in host memory.
Ranks report through files in the checkpoint's folder, so that nothing after the plan is a collective.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from . import manifest

Bucket = tuple[Path, str, tuple[list[Any], list[Any]]]
"""Path and name of a file, and its (item, object) and (item, tensor) pairs, as megatron-core writes them."""


class _Snapshot(FileSystemWriterAsync):
    """Holds what this rank writes, in host memory, and needs no other process for it.

    Args:
        copy: also copy what is in host memory already, so that training may go on.
    """

    def __init__(self, folder: Path, copy: bool) -> None:
        super().__init__(folder)
        self.copy = copy
        self.bucket: Bucket | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take this rank's part of the plan."""
        objects, tensors = [], []
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                objects.append((item, data))
            else:
                tensors.append((item, _on_host(data.detach(), self.copy)))
        if plan.items:
            name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            self.bucket = (Path(self.checkpoint_dir) / name, name, (objects, tensors))


class _PlannedSave(TorchDistSaveShardedStrategy):
    """megatron-core's strategy up to the plan; rank 0's metadata is kept for the end."""

    def __init__(self, snapshot: _Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot
        self.metadata: Any = None

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, async_strategy: str = "mcore"
    ) -> AsyncRequest:
        """Plan on all ranks; nothing is left for megatron-core to do afterwards."""
        named, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        (_, self.metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(named, False), self.snapshot, planner=planner
        )
        return AsyncRequest(None, (), [])


class ShardWriter:
    """Writes one rank's files of one checkpoint into a folder that rank 0 has made."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._snapshot: _Snapshot | None = None
        self._metadata: Any = None

    def begin(self) -> None:
        """Mark this rank as writing; the mark's disappearance without a report means failure."""
        _mark(self.folder, self.rank, "writing").touch()

    def plan(self, state: dict[str, Any], *, copy: bool) -> None:
        """Decide what this rank writes; a collective.

        Args:
            state: sharded state dict; consumed.
            copy: take a copy in host memory, so that training may go on while it is written.
        """
        self._snapshot = _Snapshot(self.folder, copy)
        strategy = _PlannedSave(self._snapshot)
        dist_checkpointing.save(
            state, str(self.folder), strategy, async_sharded_save=True, async_strategy="mcore"
        )
        self._metadata = strategy.metadata

    def write(self) -> None:
        """Write and checksum this rank's files, then report them; the copy is given up.

        Raises:
            OSError: also reported to rank 0.
        """
        try:
            results, files = self._write_file()
            done = _mark(self.folder, self.rank, "done")
            unfinished = done.with_suffix(".tmp")
            unfinished.write_bytes(pickle.dumps((results, files)))
            os.rename(unfinished, done)
        except Exception as error:
            with contextlib.suppress(OSError):
                _mark(self.folder, self.rank, "failed").write_text(str(error))
            raise
        finally:
            _mark(self.folder, self.rank, "writing").unlink(missing_ok=True)

    def collect(self) -> dict[str, list[Any]] | None:
        """On rank 0: None until every rank has reported, then write the metadata and return all checksums.

        Raises:
            OSError: a rank failed, or the metadata cannot be written.
        """
        ranks = range(dist.get_world_size())
        if any(_mark(self.folder, rank, "writing").exists() for rank in ranks):
            return None
        failed = [rank for rank in ranks if not _mark(self.folder, rank, "done").exists()]
        if failed:
            raise OSError(_reason(self.folder, failed[0]))
        results, files = [], {}
        for rank in ranks:
            mark = _mark(self.folder, rank, "done")
            written, checksums = pickle.loads(mark.read_bytes())
            results.append(written)
            files.update(checksums)
            mark.unlink()
        assert self._snapshot is not None, "nothing has been planned"
        self._snapshot.finish(self._metadata, results)
        save_config(CheckpointingConfig("torch_dist"), str(self.folder))
        return files

    def _write_file(self) -> tuple[list[Any], dict[str, list[Any]]]:
        """Write and sync this rank's file: what megatron-core wants to remember of it, and its checksum."""
        assert self._snapshot is not None, "nothing has been planned"
        bucket, self._snapshot.bucket = self._snapshot.bucket, None
        if bucket is None:
            return [], {}
        answer = _Snapshot.write_preloaded_data([self._snapshot.transforms], 0, bucket, None, None, True)
        assert answer is not None
        written: Any = answer[1]
        if isinstance(written, Exception):
            raise written
        return list(written), {bucket[1]: manifest.checksum(bucket[0])}


def _mark(folder: Path, rank: int, state: str) -> Path:
    return folder / f"rank-{rank:05d}.{state}"


def _reason(folder: Path, rank: int) -> str:
    try:
        return f"rank {rank}: {_mark(folder, rank, 'failed').read_text()}"
    except OSError:
        return f"rank {rank} could not write its part"


def _on_host(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """A tensor is written with its whole storage, so a view of a larger one is always copied."""
    if not tensor.is_cpu:
        return tensor.cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole and not copy else tensor.clone()

"""One rank's share of a save: planned together by all ranks, written alone.

megatron-core plans the save and writes the files. Its own asynchronous save would fork or spawn processes,
which survive a killed trainer and need a guarded main module; here a thread writes a copy in host memory.
Ranks report through files in the checkpoint's folder, so that nothing after the plan is a collective.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
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
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from . import manifest

Bucket = tuple[Path, str, tuple[list[Any], list[Any]]]
"""Path and name of a file, and its (item, object) and (item, tensor) pairs, as megatron-core writes them."""


@dataclass(frozen=True)
class Report:
    """What one rank has written: what megatron-core wants to remember of each item, and files' checksums."""

    results: list[WriteResult]
    files: dict[str, list[Any]]
    """Name -> [bytes, SHA-256]."""

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        items = [
            [
                result.index.fqn,
                None if result.index.offset is None else list(result.index.offset),
                result.index.index,
                result.size_in_bytes,
                result.storage_data.relative_path,
                result.storage_data.offset,
                result.storage_data.length,
            ]
            for result in self.results
        ]
        return {"items": items, "files": self.files}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Report:
        """What `plain` made this of."""
        results = [
            WriteResult(
                MetadataIndex(name, None if place is None else torch.Size(place), index),
                size,
                _StorageInfo(path, offset, length),
            )
            for name, place, index, size, path, offset, length in plain["items"]
        ]
        return cls(results, plain["files"])


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
    """Writes one rank's files of one checkpoint into a folder that another rank has made.

    Args:
        keep_open: leave the file open for reading in `opened`, wherever its folder is moved.
    """

    def __init__(self, folder: Path, rank: int, keep_open: bool = False) -> None:
        self.folder = folder
        self.rank = rank
        self.keep_open = keep_open
        self.opened: BinaryIO | None = None
        self.metadata: Any = None
        """On rank 0, once planned: the table of all tensors, without where they lie."""
        self._snapshot: _Snapshot | None = None

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
        self.metadata = strategy.metadata

    def write(self) -> Report:
        """Write and checksum this rank's files, then report them; the copy is given up.

        Raises:
            OSError: also reported in the folder.
        """
        try:
            report = self._write_file()
            if self.keep_open and report.files:
                self.opened = (self.folder / next(iter(report.files))).open("rb")
            report_in(self.folder, self.rank, report)
        except Exception as error:
            report_failure(self.folder, self.rank, error)
            raise
        finally:
            _mark(self.folder, self.rank, "writing").unlink(missing_ok=True)
        return report

    def _write_file(self) -> Report:
        """Write and sync this rank's file."""
        assert self._snapshot is not None, "nothing has been planned"
        bucket, self._snapshot.bucket = self._snapshot.bucket, None
        if bucket is None:
            return Report([], {})
        answer = _Snapshot.write_preloaded_data([self._snapshot.transforms], 0, bucket, None, None, True)
        assert answer is not None
        written: Any = answer[1]
        if isinstance(written, Exception):
            raise _without_frames(written)
        return Report(list(written), {bucket[1]: manifest.checksum(bucket[0])})


def report_in(folder: Path, rank: int, report: Report) -> None:
    """Tell whoever completes a folder that a rank's part of it is there."""
    done = _mark(folder, rank, "done")
    unfinished = done.with_suffix(".tmp")
    unfinished.write_text(json.dumps(report.plain()))
    os.rename(unfinished, done)


def report_failure(folder: Path, rank: int, error: Exception) -> None:
    """Tell whoever completes a folder why a rank's part is not there, if that can be written."""
    with contextlib.suppress(OSError):
        _mark(folder, rank, "failed").write_text(str(error))


def collect(folder: Path, ranks: Sequence[int], *, begun: bool = True) -> dict[int, Report] | None:
    """The reports of all ranks, which then leave the folder; None while one of them is awaited.

    Args:
        begun: each of them has begun, so that one without mark and report has failed.

    Raises:
        OSError: a rank failed.
    """
    if begun and any(_mark(folder, rank, "writing").exists() for rank in ranks):
        return None
    absent = [rank for rank in ranks if not _mark(folder, rank, "done").exists()]
    failed = [rank for rank in absent if begun or _mark(folder, rank, "failed").exists()]
    if failed:
        raise OSError(_reason(folder, failed[0]))
    if absent:
        return None
    reports = {}
    for rank in ranks:
        mark = _mark(folder, rank, "done")
        reports[rank] = Report.of(json.loads(mark.read_text()))
        mark.unlink()
    return reports


def complete(folder: Path, metadata: Any, reports: Iterable[Report]) -> dict[str, list[Any]]:
    """Write the table of a checkpoint whose files are all in a folder; their checksums.

    Args:
        metadata: as `ShardWriter.metadata`; filled in.
    """
    reports = list(reports)
    _Snapshot(folder, False).finish(metadata, [report.results for report in reports])
    save_config(CheckpointingConfig("torch_dist"), str(folder))
    return {name: checksum for report in reports for name, checksum in report.files.items()}


def _mark(folder: Path, rank: int, state: str) -> Path:
    return folder / f"rank-{rank:05d}.{state}"


def _reason(folder: Path, rank: int) -> str:
    try:
        return f"rank {rank}: {_mark(folder, rank, 'failed').read_text()}"
    except OSError:
        return f"rank {rank} could not write its part"


def _without_frames(error: Exception) -> Exception:
    """The error, and those before it, without the frames that they passed through.

    These hold views of BytesIO, in a cycle with the error that one of them keeps. CPython's collector frees
    such a cycle in an order that crashes the process (seen on 3.12.1).
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__, each = None, each.__context__
    return error


def _on_host(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """A tensor is written with its whole storage, so a view of a larger one is always copied."""
    if not tensor.is_cpu:
        return tensor.cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole and not copy else tensor.clone()

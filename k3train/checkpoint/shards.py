"""One rank's share of a save: planned together by all ranks, written alone.

megatron-core plans the save and writes the files. Its own asynchronous save would fork or spawn processes,
which survive a killed trainer and need a guarded main module; here a thread writes a copy in host memory.
Ranks report through files in the checkpoint's folder, so that nothing after the plan is a collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from . import manifest


class _PlannedSave(TorchDistSaveShardedStrategy):
    """megatron-core's strategy up to the plan; keeps the writer and rank 0's metadata instead of using them."""

    writer: FileSystemWriterAsync
    metadata: Any

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any, async_strategy: str
    ) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


class ShardWriter:
    """Writes one rank's files of one checkpoint into a folder that rank 0 has made."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._strategy = _PlannedSave()
        self._buckets: list[Any] = []

    def begin(self) -> None:
        """Mark this rank as writing; the mark's disappearance without a report means failure."""
        _mark(self.folder, self.rank, "writing").touch()

    def plan(self, state: dict[str, Any], *, copy: bool) -> None:
        """Decide what this rank writes; a collective.

        Args:
            state: sharded state dict; consumed.
            copy: take a copy in host memory, so that training may go on while it is written.
        """
        # megatron-core would start a server process for a queue that is not needed here.
        filesystem_async._results_queue = queue.Queue()
        log = logging.getLogger(TorchDistSaveShardedStrategy.__module__)
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            dist_checkpointing.save(
                state, str(self.folder), self._strategy, async_sharded_save=True, async_strategy="mcore"
            )
        finally:
            log.setLevel(level)
        self._buckets = [_to_host(bucket, copy) for bucket in self._strategy.writer.write_buckets or []]
        self._strategy.writer.write_buckets = None

    def write(self) -> None:
        """Write and checksum this rank's files, then report them; the copy is given up.

        Raises:
            OSError: also reported to rank 0.
        """
        try:
            results, files = [], {}
            for index, bucket in enumerate(self._buckets):
                results += self._write_bucket(index, bucket)
                files[bucket[1]] = manifest.checksum(Path(bucket[0]))
            done = _mark(self.folder, self.rank, "done")
            unfinished = done.with_suffix(".tmp")
            unfinished.write_bytes(pickle.dumps((results, files)))
            os.rename(unfinished, done)
        except Exception as error:
            with contextlib.suppress(OSError):
                _mark(self.folder, self.rank, "failed").write_text(str(error))
            raise
        finally:
            self._buckets = []
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
        self._strategy.writer.finish(self._strategy.metadata, results)
        save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(self.folder))
        return files

    def _write_bucket(self, index: int, bucket: Any) -> list[Any]:
        """Write and sync one file; what megatron-core wants to remember of each of its tensors."""
        transforms = [self._strategy.writer.transforms]
        answer = FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, None, None, True)
        assert answer is not None
        written: Any = answer[1]
        if isinstance(written, Exception):
            raise written
        return list(written)


def _mark(folder: Path, rank: int, state: str) -> Path:
    return folder / f"rank-{rank:05d}.{state}"


def _reason(folder: Path, rank: int) -> str:
    try:
        return f"rank {rank}: {_mark(folder, rank, 'failed').read_text()}"
    except OSError:
        return f"rank {rank} could not write its part"


def _to_host(bucket: Any, copy: bool) -> Any:
    path, name, (objects, tensors) = bucket
    return path, name, (objects, [(item, _on_host(tensor, copy)) for item, tensor in tensors])


def _on_host(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    return tensor.clone() if tensor.is_cpu and copy else tensor.cpu()

"""Saves, retains and loads the checkpoints of a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from parallel.groups import Groups
from parallel.topology import Topology

from .. import __version__
from ..errors import UserError
from . import folders, manifest, optimizer_state, random_state
from .shards import ShardWriter
from .verify import verify

Chunks = list[DistributedDataParallel]
Found = tuple[Path, dict[str, Any]]
"""Folder and manifest of a checkpoint."""
RANK_STATE = "rank_state"


class CheckpointManager:
    """The checkpoints of one training run; each method but `available` is called by all ranks alike.

    Args:
        root: folder of the checkpoints; what an interrupted save left there is removed.
        keep: newest checkpoints to keep; 0 keeps all.
        asynchronous: write while training goes on.
        fixed: configuration keys that must be the same when a checkpoint is loaded; must pass through JSON.
        message: told, on rank 0, what a person should know.
    """

    def __init__(
        self,
        root: Path,
        *,
        groups: Groups,
        keep: int,
        asynchronous: bool,
        fixed: dict[str, Any],
        message: Callable[[str], None],
    ) -> None:
        self.root = root
        self.groups = groups
        self.keep = keep
        self.asynchronous = asynchronous
        self.fixed = fixed
        self._message = message
        self._running: _Save | None = None
        self._published = True
        if groups.is_first:
            root.mkdir(parents=True, exist_ok=True)
            for name in folders.clean(root):
                message(f"removed {name}, which an interrupted save left behind")
        dist.barrier()

    def save(self, step: int, chunks: Chunks, optimizer: MegatronOptimizer, extra: dict[str, Any]) -> None:
        """Checkpoint the state after `step`, once the save before is done; returns early if asynchronous.

        A failure to write is told through `message`, and `wait` gives False; going on is up to the caller.

        Args:
            extra: what else `load` should return, the same on every rank; must pass through JSON.
        """
        self.wait()
        folder = folders.partial(self.root, step)
        writer = ShardWriter(folder, self.groups.rank)
        if not self._prepare(folder, writer):
            return
        state = _state(chunks, optimizer)
        state[RANK_STATE] = _rank_state(self.groups.topology, self.groups.rank, random_state.capture())
        writer.plan(state, copy=self.asynchronous)
        content = {
            "step": step,
            "k3train": __version__,
            "layout": vars(self.groups.topology),
            "updates": optimizer_state.step_count(optimizer),
            "fixed": self.fixed,
            "extra": extra,
        }
        self._running = _Save(writer, self._publish if self.groups.is_first else None, content)
        self._running.start()
        if not self.asynchronous:
            self.wait()

    def poll(self) -> None:
        """Tell about a save that has ended meanwhile; cheap and not a collective."""
        if self._running is not None and self._running.outcome:
            self._message(self._running.outcome)
            self._running.outcome = ""

    def wait(self) -> bool:
        """Wait for the running save, if any; whether the last one was published, the same on every rank."""
        if self._running is None:
            return self._published
        self._running.written.wait()
        # If a rank has died this fails, where rank 0 would wait for its part for ever.
        dist.barrier()
        self._running.join()
        self.poll()
        published = [self._running.published]
        dist.broadcast_object_list(published, src=0)
        self._running, self._published = None, published[0]
        return self._published

    def available(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return folders.available(self.root)

    def newest(self) -> Found | None:
        """The newest intact checkpoint, if there is any, once the running save is done.

        Raises:
            UserError: none of the checkpoints is intact.
        """
        self.wait()
        return self._newest_intact()

    def load(
        self,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        found: Found | None = None,
        free: Callable[[str], bool] = lambda key: False,
    ) -> dict[str, Any] | None:
        """Continue from a checkpoint, of any layout.

        Args:
            found: what `newest` gave; asked here when left out.
            free: whether a key of `fixed` may differ.

        Returns:
            the `extra` it was saved with, or None if there is no checkpoint.

        Raises:
            UserError: it belongs to another configuration, or none of the checkpoints is intact.
        """
        found = found or self.newest()
        if found is None:
            return None
        folder, content = found
        _refuse_differences(folder.name, content["fixed"], self.fixed, free)
        if "updates" not in content:
            raise UserError(
                f"{folder.name} has no optimizer state that this version reads; start another run from its "
                "weights with init_from"
            )
        state = _state(chunks, optimizer)
        saved_by = Topology(**content["layout"])
        # With other ranks, each draws on from the states that it began with.
        if saved_by.world_size == self.groups.topology.world_size:
            state[RANK_STATE] = _rank_state(saved_by, self.groups.rank)
        loaded = dist_checkpointing.load(state, str(folder))
        _load_model(chunks, loaded)
        optimizer_state.restore(optimizer, loaded["optimizer"], content["updates"], chunks)
        if RANK_STATE in loaded:
            random_state.restore(loaded[RANK_STATE])
        extra: dict[str, Any] = content["extra"]
        return extra

    def _prepare(self, folder: Path, writer: ShardWriter) -> bool:
        """Make the folder and this rank's mark in it; False on every rank if one of them cannot."""
        problem: str | None = None
        try:
            if self.groups.is_first:
                folder.mkdir(parents=True)
        except OSError as error:
            problem = str(error)
        dist.barrier()
        try:
            writer.begin()
        except OSError as error:
            problem = problem or str(error)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        first = next((text for text in problems if text), None)
        if first is None:
            return True
        self._published = False
        if self.groups.is_first:
            self._message(_failure(folder, first))
            _discard(folder)
        return False

    def _publish(self, writer: ShardWriter, content: dict[str, Any]) -> str:
        """On rank 0, in the saving thread: wait for all parts, then make them the step's checkpoint."""
        while (files := writer.collect()) is None:
            time.sleep(0.02)
        manifest.write(writer.folder, content, files)
        target = folders.complete(self.root, content["step"])
        if target.exists():
            folders.remove(target)
        writer.folder.rename(target)
        folders.sync(self.root)
        folders.prune(self.root, self.keep, content["step"])
        return f"saved {target.name}"

    def _newest_intact(self) -> Found | None:
        """Folder and manifest of the checkpoint to load; the ranks share the reading, rank 0 decides."""
        steps = [self.available() if self.groups.is_first else []]
        dist.broadcast_object_list(steps, src=0)
        world_size = dist.get_world_size()
        for step in reversed(steps[0]):
            folder = folders.complete(self.root, step)
            found: list[list[str]] = [[]] * world_size
            dist.all_gather_object(found, verify(folder, part=self.groups.rank, parts=world_size))
            problems = sorted({problem for part in found for problem in part})
            if not problems:
                contents = [manifest.read(folder) if self.groups.is_first else {}]
                dist.broadcast_object_list(contents, src=0)
                return folder, contents[0]
            if self.groups.is_first:
                self._message(f"{folder.name} is damaged ({problems[0]}); trying the one before")
        if steps[0]:
            raise UserError(
                f"none of the {len(steps[0])} checkpoints in {self.root} is intact; restore one from a copy, "
                "or start afresh with run.resume=false in another run.dir"
            )
        return None


class _Save(threading.Thread):
    """One save in the background: this rank's part, and on rank 0 the publication."""

    def __init__(
        self,
        writer: ShardWriter,
        publish: Callable[[ShardWriter, dict[str, Any]], str] | None,
        content: dict[str, Any],
    ) -> None:
        super().__init__(name=f"checkpoint-{content['step']}", daemon=True)
        self.written = threading.Event()
        self.published = False
        self.outcome = ""
        self._writer, self._publish, self._content = writer, publish, content

    def run(self) -> None:
        # Rank 0 finds the reason of a failure in the folder.
        with contextlib.suppress(Exception):
            self._writer.write()
        self.written.set()
        if self._publish is None:
            return
        try:
            outcome = self._publish(self._writer, self._content)
            self.published = True
        except Exception as error:
            _discard(self._writer.folder)
            outcome = _failure(self._writer.folder, error)
        self.outcome = outcome


def _state(chunks: Chunks, optimizer: MegatronOptimizer) -> dict[str, Any]:
    """The sharded state of model and optimizer."""
    state = _model_state(chunks)
    state["optimizer"] = optimizer_state.describe(optimizer, chunks, state)
    return state


def _rank_state(topology: Topology, rank: int, random: dict[str, Any] | None = None) -> ShardedObject:
    return ShardedObject(RANK_STATE, random, (topology.world_size,), (rank,))


def _model_state(chunks: Chunks) -> dict[str, Any]:
    """Every chunk's tensors, by chunk, in one namespace."""
    models = unwrap_model(chunks)
    states = [model.sharded_state_dict(prefix="model.") for model in models]
    names = [name for state in states for name in state]
    assert len(names) == len(set(names)), "two chunks of this rank have tensors of the same name"
    return {key: state for key, state in zip(_chunk_keys(chunks), states, strict=True)}


def _load_model(chunks: Chunks, loaded: dict[str, Any]) -> None:
    for key, model in zip(_chunk_keys(chunks), unwrap_model(chunks), strict=True):
        model.load_state_dict({name.removeprefix("model."): value for name, value in loaded[key].items()})


def _chunk_keys(chunks: Chunks) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _refuse_differences(
    name: str, saved: dict[str, Any], current: dict[str, Any], free: Callable[[str], bool]
) -> None:
    different = [
        key
        for key in sorted(saved.keys() | current.keys())
        if _plain(saved.get(key)) != _plain(current.get(key)) and not free(key)
    ]
    if not different:
        return
    shown = ", ".join(f"{key}={saved.get(key)} (now {current.get(key)})" for key in different[:3])
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    raise UserError(
        f"{name} was made with {shown}{more}; set the old value again, or start a new run in another run.dir"
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _failure(folder: Path, problem: object) -> str:
    return f"could not save {folder.name.removesuffix(folders.PARTIAL)}: {problem}"


def _discard(folder: Path) -> None:
    # What resists is removed at the next start.
    with contextlib.suppress(OSError):
        folders.remove(folder)

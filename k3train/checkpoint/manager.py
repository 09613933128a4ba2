"""Saves, retains and loads the checkpoints of a run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from ..resume import BATCH, Change, changes, refuse_batch
from . import folders, manifest, optimizer_state, policy_state, random_state, shards
from .local import LocalDisk
from .saving import Save, Upload, discard, failure
from .shards import Report, ShardWriter
from .staging import StagedLoad, staged
from .tensors import CheckpointTensors
from .unpickling import plain_values_only, refuse_pickled
from .verify import verify

Chunks = list[DistributedDataParallel]
RANK_STATE = "rank_state"
PATIENCE_SECONDS = 1.0
"""A wait for the save before that is worth telling."""


class Found(NamedTuple):
    """A checkpoint to load."""

    folder: Path
    content: dict[str, Any]
    """Its manifest."""
    on_nodes: bool = False
    """Whether it is the parts on the nodes' disks, `folder` being this node's."""


class CheckpointManager:
    """The checkpoints of one training run; each method but `available` is called by all ranks alike.

    Args:
        root: folder of the checkpoints; what an interrupted save left there is removed.
        keep: newest checkpoints to keep; 0 keeps all.
        keep_every: checkpoints of steps that are multiples of it stay too; 0: none for that.
        skip_when_busy: leave a save out that may be left out while the one before is still written.
        asynchronous: write while training goes on.
        local: save to the nodes' disks first, and to `root` from there.
        fixed: configuration keys to compare with when a checkpoint is loaded; must pass through JSON.
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
        keep_every: int = 0,
        skip_when_busy: bool = False,
        local: Callable[[], LocalDisk] | None = None,
    ) -> None:
        self.root = root
        self.groups = groups
        self.keep, self.keep_every = keep, keep_every
        self.skip_when_busy = skip_when_busy
        self.asynchronous = asynchronous
        self.fixed = fixed
        self._message = message if groups.is_first else lambda text: None
        self._running: Save | None = None
        self._upload: Upload | None = None
        self._published = True
        self.changes: list[Change] = []
        """What the last `load` found another layout to have."""
        if groups.is_first:
            root.mkdir(parents=True, exist_ok=True)
            self._clean(root)
        dist.barrier()
        self.disk = local() if local else None
        self.saves_locally = self.disk is not None
        if self.disk is not None and self.disk.leads:
            self._clean(self.disk.root)
        dist.barrier()

    def save(
        self,
        step: int,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        extra: dict[str, Any],
        *,
        may_skip: bool = False,
    ) -> bool:
        """Checkpoint the state after `step`, once the save before is done; returns early if asynchronous.

        A failure to write is told through `message`, and `wait` gives False; going on is up to the caller.

        Args:
            extra: what else `load` should return, the same on every rank; must pass through JSON.
            may_skip: leave it out, as `skip_when_busy` says, and leave it on the nodes' disks while another
                one is uploaded.

        Returns:
            False if it was left out.
        """
        facts = _gather((self._running is not None and self._running.is_alive(), uuid.uuid4().hex))
        if any(busy for busy, _ in facts) and self.skip_when_busy and may_skip:
            self._message(f"step {step} is not saved: the save before is still written")
            return False
        self._wait_told(step)
        writer = self._prepared(step)
        if writer is None:
            return True
        state = sharded_state(chunks, optimizer)
        state[RANK_STATE] = _rank_state(self.groups.topology, self.groups.rank, random_state.capture())
        writer.plan(state, copy=self.asynchronous)
        content = {
            "step": step,
            "save": facts[0][1],
            "k3train": __version__,
            "layout": vars(self.groups.topology),
            "updates": optimizer_state.step_count(optimizer),
            "fixed": self.fixed,
            "extra": extra,
        }
        self._running = self._begun(writer, content, may_skip)
        self._running.start()
        if not self.asynchronous:
            self.wait()
        return True

    def poll(self) -> None:
        """Tell about a save, or an upload, that has ended meanwhile; cheap and not a collective."""
        for thread in (self._running, self._upload):
            if thread is not None and thread.outcome:
                self._message(thread.outcome)
                thread.outcome = ""

    def wait(self) -> bool:
        """Wait for the running save, if any; whether the last one was published, the same on every rank.

        One on the nodes' disks is published when all nodes have their parts: its upload may go on.
        """
        if self._running is None:
            return self._published
        self._running.written.wait()
        # If a rank has died this fails, where the rank that completes a folder would wait for it for ever.
        dist.barrier()
        self._running.join()
        self.poll()
        self._published = all(_gather(self._running.published))
        self._running = None
        if not self._published and self.saves_locally:
            self._leave_local()
        return self._published

    def finish(self) -> bool:
        """Wait for the running save and the running upload; whether the save was published, as `wait`."""
        published = self.wait()
        self._wait_for_upload()
        return published

    def available(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return folders.available(self.root)

    def newest(self, before: int | None = None) -> Found | None:
        """The newest intact checkpoint, if there is any, once the running save is done.

        Of the parts on the nodes' disks, where these are all there, or else of the run's folder.

        Args:
            before: look at checkpoints of earlier steps only; None where none of them is intact.

        Raises:
            UserError: none of the checkpoints is intact.
        """
        self.wait()
        return self._newest_intact(before)

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
            free: whether a key of `fixed` that is none of the layout's may differ, or one that makes a batch.

        Returns:
            the `extra` it was saved with, or None if there is no checkpoint.

        Raises:
            UserError: it belongs to another configuration, would run code, or none of them is intact.
        """
        found = found or self.newest()
        if found is None:
            return None
        folder, content, _ = found
        self.changes = _layout_changes(folder.name, content["fixed"], self.fixed, free)
        if "updates" not in content:
            raise UserError(
                f"{folder.name} has no optimizer state that this version reads; start another run from its "
                "weights with init_from"
            )
        state = sharded_state(chunks, optimizer)
        saved_by = Topology(**content["layout"])
        rank, ranks = self.groups.rank, self.groups.topology.world_size
        # Each object must be read once. A rank that there was not draws on from the states it began with.
        state[RANK_STATE] = {
            str(number): _rank_state(saved_by, number) for number in range(rank, saved_by.world_size, ranks)
        }
        with self._readable(found) as (folder, strategy):
            missing = policy_state.leave_out(state, CheckpointTensors(folder))
            loaded = self._read(state, folder, strategy)
        policy_state.put_back(loaded, missing)
        _load_model(chunks, loaded)
        optimizer_state.restore(optimizer, loaded["optimizer"], content["updates"], chunks)
        if own := loaded.get(RANK_STATE, {}).get(str(rank)):
            random_state.restore(own)
        extra: dict[str, Any] = content["extra"]
        return extra

    def _clean(self, root: Path) -> None:
        for name in folders.clean(root):
            self._message(f"removed {name}, which an interrupted save left behind")

    def _wait_told(self, step: int) -> None:
        started = time.monotonic()
        self.wait()
        if (seconds := time.monotonic() - started) > PATIENCE_SECONDS:
            self._message(f"step {step} waited {seconds:.1f} s for the save before")

    def _prepared(self, step: int) -> ShardWriter | None:
        """A writer into the folder of a step: on the node's disk, or in the run's folder where that fails."""
        if self.saves_locally:
            assert self.disk is not None
            writer = ShardWriter(folders.partial(self.disk.root, step), self.groups.rank, keep_open=True)
            if self._prepare(writer, makes=self.disk.leads):
                return writer
            self._leave_local()
        writer = ShardWriter(folders.partial(self.root, step), self.groups.rank)
        if self._prepare(writer, makes=self.groups.is_first):
            return writer
        self._published = False
        return None

    def _prepare(self, writer: ShardWriter, *, makes: bool) -> bool:
        """Make the folder, on the ranks that do, and this rank's mark in it; False on all if one cannot."""
        problem: str | None = None
        try:
            if makes:
                writer.folder.mkdir(parents=True)
        except OSError as error:
            problem = str(error)
        dist.barrier()
        try:
            writer.begin()
        except OSError as error:
            problem = problem or str(error)
        first = next((text for text in _gather(problem) if text), None)
        if first is None:
            return True
        self._message(failure(writer.folder, first))
        if makes:
            discard(writer.folder)
        return False

    def _leave_local(self) -> None:
        self.saves_locally = False
        self._message(f"from now on checkpoints go straight to {self.root}, not to the local disks")

    def _begun(self, writer: ShardWriter, content: dict[str, Any], may_skip: bool) -> Save:
        """The thread of a save, and behind it that of its upload, if it has one."""
        publish = partial(self._publish, table=writer.metadata, content=content)
        world = range(self.groups.topology.world_size)
        if not self.saves_locally:
            return Save(writer, world, publish if self.groups.is_first else None, None)
        assert self.disk is not None
        step = content["step"]
        self._upload = self._next_upload(step, publish, may_skip) or self._upload
        new = self._upload if self._upload is not None and self._upload.ident is None else None
        keep_part = partial(self._publish_part, table=writer.metadata, content=content)
        return Save(writer, self.disk.ranks, keep_part if self.disk.leads else None, new)

    def _next_upload(
        self, step: int, publish: Callable[[Path, Mapping[int, Report]], str], may_skip: bool
    ) -> Upload | None:
        """The upload of a step; None where it must wait for a later step's, as one still goes on."""
        kept = bool(self.keep_every) and step % self.keep_every == 0
        if may_skip and not kept:
            states = _gather(self._upload.state if self._upload else "done")
            if "failed" not in states and "running" in states:
                self._message(f"step {step} stays on the local disks: an upload is still going on")
                return None
        self._wait_for_upload()
        first, ranks = self.groups.is_first, self.groups.topology.world_size
        return Upload(folders.partial(self.root, step), self.groups.rank, ranks, publish if first else None)

    def _wait_for_upload(self) -> None:
        """Until all ranks are done, or one has failed and the others have given up; a collective."""
        if self._upload is None:
            return
        while "running" in (states := _gather(self._upload.state)):
            if "failed" in states:
                self._upload.abandon.set()
            time.sleep(0.05)
        self._upload.join()
        self.poll()
        self._upload = None

    def _publish(
        self, folder: Path, reports: Mapping[int, Report], *, table: Any, content: dict[str, Any]
    ) -> str:
        """On rank 0, in a thread: make a folder with all files the step's checkpoint in the run's folder."""
        files = shards.complete(folder, table, reports.values())
        manifest.write(folder, content, files)
        target = folders.publish(folder, self.root, content["step"])
        folders.prune(self.root, self.keep, content["step"], self.keep_every)
        return f"saved {target.name}"

    def _publish_part(
        self, folder: Path, reports: Mapping[int, Report], *, table: Any, content: dict[str, Any]
    ) -> str:
        """On the rank that leads a node, in a thread: the same for the node's part."""
        assert self.disk is not None
        target = self.disk.publish(folder, content, reports, table)
        return f"saved {target.name} on the local disks"

    @contextmanager
    def _readable(self, found: Found) -> Iterator[tuple[Path, StagedLoad | None]]:
        """A folder with all that this rank will read, or a strategy that fetches it there."""
        if not found.on_nodes:
            yield found.folder, None
            return
        assert self.disk is not None
        with staged(self.disk, found.content["step"], self.groups.device) as stage:
            yield stage.folder, StagedLoad(stage)

    def _read(self, state: dict[str, Any], folder: Path, strategy: StagedLoad | None) -> dict[str, Any]:
        """What megatron-core reads; a file that would run code is refused on all ranks."""
        loaded: dict[str, Any] = {}
        problem = ""
        try:
            with plain_values_only(folder):
                loaded = dist_checkpointing.load(state, str(folder), strategy)
            for part in loaded.values():
                refuse_pickled(folder, part)
        except UserError as error:
            problem = str(error)
        if first := next((text for text in _gather(problem) if text), ""):
            raise UserError(first)
        return loaded

    def _newest_intact(self, before: int | None = None) -> Found | None:
        """The checkpoint to load; the ranks share the reading, and decide alike."""
        listed = [self.available() if self.groups.is_first else []]
        dist.broadcast_object_list(listed, src=0)
        durable, on_nodes = listed[0], self._on_nodes()
        steps = sorted({*durable, *on_nodes}, reverse=True)
        for step in steps:
            if before is not None and step >= before:
                continue
            if step in on_nodes and self._intact_on_nodes(step):
                assert self.disk is not None
                return Found(folders.complete(self.disk.root, step), on_nodes[step], True)
            if step in durable and (found := self._intact_in_run(step)):
                return found
        if steps and before is None:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self.root} is intact; restore one from a copy, "
                "or start afresh with run.resume=false in another run.dir"
            )
        return None

    def _intact_in_run(self, step: int) -> Found | None:
        folder = folders.complete(self.root, step)
        if self._damaged(folder, verify(folder, part=self.groups.rank, parts=dist.get_world_size())):
            return None
        contents = [manifest.read(folder) if self.groups.is_first else {}]
        dist.broadcast_object_list(contents, src=0)
        return Found(folder, contents[0])

    def _intact_on_nodes(self, step: int) -> bool:
        assert self.disk is not None
        folder, ranks = folders.complete(self.disk.root, step), self.disk.ranks
        # A node without a part of the step has nothing to read, and none is missed.
        part = ranks.index(self.groups.rank)
        problems = verify(folder, part=part, parts=len(ranks)) if folder.is_dir() else []
        return not self._damaged(folder, problems, "on a local disk ", "the run's folder")

    def _damaged(
        self, folder: Path, own: list[str], where: str = "", instead: str = "the one before"
    ) -> bool:
        """Whether any rank has found a problem, which is told."""
        problems = sorted({problem for part in _gather(own) for problem in part})
        if problems:
            self._message(f"{folder.name} {where}is damaged ({problems[0]}); trying {instead}")
        return bool(problems)

    def _on_nodes(self) -> dict[int, dict[str, Any]]:
        """Step -> manifest of each that all parts of are on the nodes' disks; a collective."""
        if self.disk is None:
            return {}
        held: dict[int, dict[str, dict[str, Any]]] = {}
        ranks: dict[str, set[int]] = {}
        for parts in _gather(self.disk.parts() if self.disk.leads else {}):
            for step, content in parts.items():
                held.setdefault(step, {})[content["save"]] = content
                ranks.setdefault(content["save"], set()).update(content["ranks"])
        found = {}
        for step, saves in held.items():
            # Two saves of one step leave parts of both where a node had come back without the newer one.
            (save, content), *others = saves.items()
            if not others and len(ranks[save]) == Topology(**content["layout"]).world_size:
                found[step] = content
        return found


def _gather(value: Any) -> list[Any]:
    """Every rank's value; a collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def sharded_state(chunks: Chunks, optimizer: MegatronOptimizer) -> dict[str, Any]:
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


def _layout_changes(
    name: str, saved: dict[str, Any], current: dict[str, Any], free: Callable[[str], bool]
) -> list[Change]:
    """What differs of the layout; raises UserError for what must stay."""
    layout, different = changes(saved, current, free)
    if different:
        listed = ", ".join(f"{each.key}={each.before} (now {each.now})" for each in different[:3])
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise UserError(
            f"{name} was made with {listed}{more}; set the old value again, or start a new run in another "
            "run.dir"
        )
    if any(change.key in BATCH for change in layout):
        refuse_batch(name, saved, current)
    return layout

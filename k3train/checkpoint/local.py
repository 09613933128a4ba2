"""Checkpoints on the disks of the nodes: each has the files of its own ranks, saved fast and then uploaded.

A node's folder of a step has those files, `reports.json` with what its ranks wrote, on rank 0's node also the
table of all tensors without where they lie, and a manifest. `staging` makes one checkpoint of the parts.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import UserError
from . import folders, manifest
from .places import IDENTITY, PART_TABLE, REPORTS, local_root
from .shards import Report


@dataclass(frozen=True)
class LocalDisk:
    """A node's folder of a run's checkpoints."""

    root: Path
    ranks: list[int]
    """Of this run, those that share it, ascending."""
    rank: int
    keep: int

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its node."""
        return self.rank == self.ranks[0]

    def publish(
        self, folder: Path, content: dict[str, Any], reports: Mapping[int, Report], table: Any
    ) -> Path:
        """Make the files of the node's ranks, which are all in a folder, the node's part of a step.

        Args:
            table: `ShardWriter.metadata` of rank 0; None on other nodes.
        """
        plain = {str(rank): report.plain() for rank, report in reports.items()}
        (folder / REPORTS).write_text(json.dumps(plain))
        folders.sync(folder / REPORTS)
        if table is not None:
            (folder / PART_TABLE).write_bytes(pickle.dumps(table))
            folders.sync(folder / PART_TABLE)
        files = {name: checksum for report in reports.values() for name, checksum in report.files.items()}
        manifest.write(folder, {**content, "ranks": sorted(reports)}, files)
        target = folders.publish(folder, self.root, content["step"])
        folders.prune(self.root, self.keep, content["step"])
        return target

    def parts(self) -> dict[int, dict[str, Any]]:
        """Step -> manifest, without its files, of each that this node has a part of."""
        found = {}
        for step in folders.available(self.root):
            try:
                content = manifest.read(folders.complete(self.root, step))
                found[step] = {key: value for key, value in content.items() if key != "files"}
            except (OSError, ValueError):
                continue  # torn: as good as absent, the other place has the step or an older one is taken
        return found


def join(folder: str, run: Path, rank: int, *, keep: int, need_bytes: int) -> LocalDisk:
    """Make this node's folder of a run and find the ranks that share it; a collective.

    Args:
        folder: `checkpoint.local_dir`; each node may expand its variables otherwise.
        run: the durable folder of the run's checkpoints, which knows its identity.
        need_bytes: of one checkpoint, all ranks together.

    Raises:
        UserError: on every rank, where one of them cannot write there.
    """
    identity = [_identity(run) if rank == 0 else "", uuid.uuid4().hex]
    dist.broadcast_object_list(identity, src=0)
    problem, root = "", Path()
    mark = f".rank-{identity[1]}-"
    try:
        root = local_root(folder, identity[0])
        _make_private(root)
        folders.check_writable(root, 0)
        (root / f"{mark}{rank}").touch()
        _refuse_strangers(root, root / f"{mark}{rank}")
    except (OSError, UserError) as error:
        problem = str(error)
    problems = _gather(problem)
    # Every mark is there by now.
    ranks = sorted(int(path.name.removeprefix(mark)) for path in root.glob(f"{mark}*")) if not problem else []
    if not problem and ranks:
        need = need_bytes * len(ranks) // len(problems)
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        if free < need:
            problem = (
                f"{root} has {free / 1e9:.1f} GB free; its part of a checkpoint needs {need / 1e9:.1f} GB"
            )
    problems = [first or second for first, second in zip(problems, _gather(problem), strict=True)]
    if not any(problems):
        (root / f"{mark}{rank}").unlink(missing_ok=True)
        return LocalDisk(root, ranks, rank, keep)
    number, text = next((number, text) for number, text in enumerate(problems) if text)
    raise UserError(f"checkpoint.local_dir={folder}: rank {number}: {text}")


def _make_private(root: Path) -> None:
    """Make the folder, which often lies where every user of the node may write, for this user alone."""
    with suppress(OSError):  # what cannot be made is told of where it is written to
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        root.chmod(0o700)


def _refuse_strangers(root: Path, own: Path) -> None:
    """Raise UserError where somebody else has made the folder, and could change what is read from it."""
    if root.is_symlink() or root.stat().st_uid != own.stat().st_uid:
        raise UserError(f"{root} belongs to another user; remove it, or set another checkpoint.local_dir")


def _identity(run: Path) -> str:
    """What tells a run from another one that had the same folder."""
    path = run / IDENTITY
    if not path.is_file():
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(uuid.uuid4().hex[:16])
        unfinished.rename(path)
    return path.read_text().strip()


def _gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered

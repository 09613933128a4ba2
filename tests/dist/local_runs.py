"""What the ranks of the tests of node-local checkpoints do; each rank is a node with a disk of its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from k3train.checkpoint import saving
from k3train.checkpoint.local import join
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.shards import ShardWriter
from k3train.errors import UserError
from k3train.resume import fixed_keys
from k3train.train.step import Trainer

from . import curriculum_runs
from .checkpoint_runs import fingerprint, small_config, start, train

DISK = "$K3TRAIN_TEST_DISK"


def manager(
    trainer: Trainer, root: str, disks: str, told: list[str], *, nodes: bool = True, **options: Any
) -> CheckpointManager:
    """A manager over one disk for each rank, or over one for all."""
    rank = trainer.groups.rank
    os.environ["K3TRAIN_TEST_DISK"] = f"{disks}/node{rank}" if nodes else disks
    return CheckpointManager(
        Path(root),
        groups=trainer.groups,
        keep=0,
        asynchronous=True,
        # As many samples a step in every layout.
        fixed={**fixed_keys(trainer.config), "run.microbatches": 8 // (trainer.config.parallel.data or 1)},
        message=told.append,
        local=lambda: join(DISK, Path(root), rank, keep=2, need_bytes=0),
        **options,
    )


def saved(root: str, disks: str, config: dict[str, Any], nodes: bool = True) -> dict[str, Any]:
    """Save steps 2 and 4 to the disks; the upload of the latter finds a file in its way."""
    told: list[str] = []
    trainer = start(small_config(**config))
    checkpoints = manager(trainer, root, disks, told, nodes=nodes)
    train(trainer, range(1, 3))
    checkpoints.save(2, trainer.modules, trainer.optimizer, {"step": 2})
    published = [checkpoints.finish()]
    train(trainer, range(3, 5))
    if trainer.groups.is_first:
        (Path(root) / "step-00000004.partial").touch()
    checkpoints.save(4, trainer.modules, trainer.optimizer, {"step": 4})
    published.append(checkpoints.finish())
    return {"told": told, "published": published, "tensors": fingerprint(trainer)}


def loaded(
    root: str, disks: str, config: dict[str, Any], save_as: int | None = None, nodes: bool = True
) -> dict[str, Any]:
    """Take over the newest checkpoint, and save it again, to the run's folder alone."""
    told: list[str] = []
    trainer = start(small_config(**config))
    checkpoints = manager(trainer, root, disks, told, nodes=nodes)
    extra = checkpoints.load(trainer.modules, trainer.optimizer) or {"step": 0}
    if save_as is not None:
        checkpoints.saves_locally = False
        checkpoints.save(save_as, trainer.modules, trainer.optimizer, {"step": save_as})
        checkpoints.finish()
    return {"told": told, "step": extra["step"], "tensors": fingerprint(trainer)}


def joined(root: str, folder: str) -> str:
    """What is said of a folder that cannot be used."""
    trainer = start(small_config({"data": 2}))
    Path(root).mkdir(exist_ok=True)
    try:
        join(folder, Path(root), trainer.groups.rank, keep=1, need_bytes=0)
    except UserError as error:
        return str(error)
    return ""


def pressed(root: str, disks: str) -> dict[str, Any]:
    """Saves that come due while the one before, then while its upload, is held up."""
    told: list[str] = []
    trainer = start(small_config({}))
    gate, door = threading.Event(), threading.Event()
    write, copy = ShardWriter.write, saving.Upload._copy
    ShardWriter.write = lambda self: (gate.wait(), write(self))[1]  # type: ignore[method-assign]
    saving.Upload._copy = lambda *rest: (door.wait(), copy(*rest))[1]  # type: ignore[method-assign]
    checkpoints = manager(trainer, root, disks, told, skip_when_busy=True)

    def save(step: int, may_skip: bool) -> bool:
        return checkpoints.save(step, trainer.modules, trainer.optimizer, {"step": step}, may_skip=may_skip)

    taken = [save(1, True), save(2, True)]
    gate.set()
    checkpoints.wait()
    taken.append(save(3, True))
    checkpoints.wait()
    threading.Timer(0.2, door.set).start()
    taken.append(save(4, False))
    checkpoints.finish()
    disk = checkpoints.disk
    assert disk is not None
    steps = [sorted(path.name for path in folder.glob("step-*")) for folder in (Path(root), disk.root)]
    return {"taken": taken, "told": told, "steps": steps}


def lost_disk(root: str, disks: str) -> dict[str, Any]:
    """A save for whose folder the node's disk has no room: it goes to the run's folder."""
    told: list[str] = []
    trainer = start(small_config({"data": 2}))
    checkpoints = manager(trainer, root, disks, told)
    assert checkpoints.disk is not None
    if trainer.groups.rank == 1:
        (checkpoints.disk.root / "step-00000001.partial").touch()
    for step in (1, 2):
        checkpoints.save(step, trainer.modules, trainer.optimizer, {"step": step})
    return {"published": checkpoints.finish(), "told": told, "newest": checkpoints.newest() is not None}


def held_up(root: str, disks: str) -> None:
    """Save steps 1 and 2; the upload of the latter stops half-way, which a file tells."""
    trainer = start(small_config({"data": 2}))
    checkpoints = manager(trainer, root, disks, [])
    checkpoints.save(1, trainer.modules, trainer.optimizer, {"step": 1})
    checkpoints.finish()

    def stop(self: saving.Upload, source: Any, target: Path, expected: str) -> None:
        target.write_bytes(source.read(1000))
        Path(disks, f"stopped-{self.rank}").touch()
        threading.Event().wait()

    saving.Upload._copy = stop  # type: ignore[method-assign]
    checkpoints.save(2, trainer.modules, trainer.optimizer, {"step": 2})
    checkpoints.wait()
    checkpoints.finish()


def stages(arguments: list[str], disks: str) -> list[int]:
    """A run in stages, each rank on a node of its own."""
    os.environ["K3TRAIN_TEST_DISK"] = f"{disks}/node{os.environ['RANK']}"
    return curriculum_runs.run(arguments)

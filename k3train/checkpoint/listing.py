"""What checkpoints a run has, whether they are whole, and which of them may go. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import CheckpointConfig
from ..config_file import load_yaml
from ..errors import UserError
from . import folders, manifest, places
from .verify import verify

AXES = {"pipeline": "PP", "virtual": "VPP", "context": "CP", "data": "DP", "expert": "EP"}


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or this node's part of one."""

    step: int
    folder: str
    where: str
    """run, or local: this node's disk."""
    bytes: int
    """Of its files, as the manifest has them."""
    saved: float | None
    """When it was complete, epoch seconds."""
    layout: dict[str, int]
    stage: str | None
    ranks: list[int] | None
    """Whose part it is; None for a whole one."""
    problem: str | None
    """What is wrong at first sight: file sizes are compared, contents are not read."""

    @property
    def shown_layout(self) -> str:
        """As in PP2 x DP4."""
        parts = [
            f"{short}{self.layout[axis]}" for axis, short in AXES.items() if self.layout.get(axis, 1) > 1
        ]
        return " x ".join(parts) or ("one rank" if self.layout else "unknown")

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def root_of(run: Path) -> Path:
    """The folder of a run's checkpoints; raises UserError where it has none."""
    root = run / places.FOLDER
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder; name one, for example runs/tiny")
    if not root.is_dir():
        raise UserError(f"{run}: it has no {places.FOLDER} folder, so no checkpoint")
    return root


def entries(run: Path) -> list[Entry]:
    """All checkpoints of a run by step: those in its folder, and the parts on this node's disk."""
    roots = [("run", root_of(run))]
    if (local := _local_root(run)) is not None:
        roots.append(("local", local))
    found = [_entry(root, step, where) for where, root in roots for step in folders.available(root)]
    return sorted(found, key=lambda entry: (entry.step, entry.where != "run"))


def problems_of(folder: Path, told: Callable[[str, int], None] = lambda name, size: None) -> list[str]:
    """Read a checkpoint's files and compare them with its manifest; each is `told` of before its reading."""
    try:
        listed = sorted(manifest.read(folder)["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return verify(folder)
    problems = []
    for part, (name, expected) in enumerate(listed):
        told(name, expected[0])
        problems += verify(folder, part=part, parts=len(listed))
    return problems


@dataclass(frozen=True)
class Plan:
    """What of a run's checkpoints would go, and what stays."""

    remove: list[int]
    keep: list[int]
    damaged: list[int]
    """Of `remove` or `keep`."""
    newest_intact: int | None
    leftovers: list[str]
    """Folders of interrupted saves and removals."""


def plan_prune(run: Path, keep: int, keep_every: int, *, damaged: bool, contents: bool) -> Plan:
    """Decide what to remove from a run's folder.

    Args:
        keep: newest whole checkpoints that stay; 0: all.
        keep_every: multiples stay too.
        damaged: remove damaged ones as well.
        contents: read files to find the newest intact one, which always stays; else sizes decide.
    """
    root = root_of(run)
    steps = folders.available(root)
    bad = {step for step in steps if verify(folders.complete(root, step), contents=False)}
    whole = [step for step in steps if step not in bad]
    newest = None
    for step in reversed(whole):
        if not contents or not problems_of(folders.complete(root, step)):
            newest = step
            break
        bad.add(step)
    surplus = set(folders.surplus([step for step in whole if step not in bad], keep, keep_every))
    if damaged and newest is not None:
        surplus |= bad
    surplus.discard(newest if newest is not None else -1)
    left = [path.name for path in root.iterdir() if path.suffix in (folders.PARTIAL, folders.REMOVING)]
    stays = [step for step in steps if step not in surplus]
    return Plan(sorted(surplus), stays, sorted(bad), newest, sorted(left))


def prune(run: Path, plan: Plan) -> None:
    """Do what `plan_prune` says, while no other process uses the run; raises UserError if one does."""
    root = root_of(run)
    lock = folders.lock_folder(run)
    try:
        for step in plan.remove:
            folders.remove(folders.complete(root, step))
        folders.clean(root)
    finally:
        folders.unlock(lock)


def retention(run: Path) -> tuple[int, int]:
    """`checkpoint.keep` and `keep_every` of a run, the defaults where it has no config.yaml."""
    own = CheckpointConfig()
    if (run / "config.yaml").is_file():
        own = load_yaml(run / "config.yaml").checkpoint
    return own.keep, own.keep_every


def _entry(root: Path, step: int, where: str) -> Entry:
    folder = folders.complete(root, step)
    problems = verify(folder, contents=False)
    content: dict[str, Any] = {}
    saved = None
    try:
        content = manifest.read(folder)
        saved = (folder / manifest.NAME).stat().st_mtime
    except (OSError, ValueError):
        pass
    files = content.get("files", {})
    return Entry(
        step=step,
        folder=str(folder),
        where=where,
        bytes=sum(size for size, _ in files.values()),
        saved=saved,
        layout=content.get("layout", {}),
        stage=content.get("extra", {}).get("stage"),
        ranks=content.get("ranks"),
        problem=problems[0] if problems else None,
    )


def _local_root(run: Path) -> Path | None:
    """This node's folder of the run, where its configuration has one that can be named here."""
    try:
        folder = load_yaml(run / "config.yaml").checkpoint.local_dir
        identity = (run / places.FOLDER / places.IDENTITY).read_text().strip()
        root = None if folder is None else places.local_root(folder, identity)
        return root if root is None or os.access(root, os.R_OK | os.X_OK) else None
    except (OSError, UserError):
        return None

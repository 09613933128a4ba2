"""Whether a run has reached its last step, seen from outside the run and without torch."""

from __future__ import annotations

from pathlib import Path

from k3train.checkpoint import folders
from k3train.config import Config
from k3train.curriculum import last_step


def last_checkpoint(config: Config) -> Path:
    """Folder of the checkpoint that a run ends with, of a run in stages that of the last one to run."""
    return folders.complete(Path(config.run.dir).expanduser() / "checkpoints", last_step(config))


def is_finished(config: Config) -> bool:
    """Whether the run's folder holds a complete checkpoint of the last step, or of a later one."""
    return max(folders.available(last_checkpoint(config).parent), default=0) >= last_step(config)

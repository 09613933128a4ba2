"""How workers tell the agent that started them who they are and how they ended.

torchrun reports any failed worker as exit status 1, and sends its own way of dying to all of them when it is
signalled. Through one small file for each worker the agent can signal the workers themselves, and a refused
input keeps its message and its exit status.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER_VARIABLE = "K3TRAIN_WORKER_STATUS"
STARTS_VARIABLE = "K3TRAIN_STARTS"
"""How often this node's ranks have been started; torchrun's own count leaves out what other nodes caused."""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker of this machine."""

    rank: int
    pid: int
    code: int | None = None
    """Exit status; None while it runs."""
    message: str = ""
    """What the user should read when `code` is 2."""


def write(status: WorkerStatus) -> bool:
    """Replace this worker's file. False when no agent of ours is listening."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return False
    target = Path(folder) / f"{status.rank}.json"
    draft = target.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(status)))
    draft.replace(target)
    return True


def read(folder: str | Path) -> list[WorkerStatus]:
    """What the workers have written so far, by rank."""
    found = [WorkerStatus(**json.loads(path.read_text())) for path in Path(folder).glob("*.json")]
    return sorted(found, key=lambda status: status.rank)

"""Where a run's checkpoints are: its own folder, and one on the disk of each node. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import UserError

FOLDER = "checkpoints"
"""In the run's folder."""
IDENTITY = "run-id"
"""In that folder: what tells a run from another one that had the same folder."""
REPORTS, PART_TABLE = "reports.json", ".table"
"""In a node's part of a checkpoint: what its ranks wrote, and the table of all tensors without places."""


def local_root(folder: str, identity: str) -> Path:
    """A run's folder in `checkpoint.local_dir`, with this process's home and variables.

    Raises:
        UserError: a variable is not set.
    """
    expanded = os.path.expandvars(os.path.expanduser(folder))
    if unset := re.search(r"\$\{?(\w+)", expanded):
        raise UserError(f"{unset[1]} is not set in the environment; set it on every node, or name a folder")
    return Path(expanded) / f"k3train-{identity}"

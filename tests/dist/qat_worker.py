"""One rank of several runs in turn, each with its own overrides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.parity import worker


def train(runs: dict[str, list[str]], folder: str) -> dict[str, list[dict[str, Any]]]:
    """Reports of every run by name; its tensors go to folder/NAME/RANK.pt."""
    reports = {}
    for number, (name, overrides) in enumerate(runs.items()):
        # The store of the run before may not have let go of its port yet.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + (number > 0))
        own = Path(folder) / name
        own.mkdir(exist_ok=True)
        reports[name] = worker.train(overrides, str(own))
    return reports

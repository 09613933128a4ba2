"""`events.jsonl`: what happened to a run beside its steps: a resume, a skipped step, a fallback.

Unlike the metrics it is a history: a resumed run appends to it and removes nothing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FILE_NAME = "events.jsonl"


def append(run_dir: str | os.PathLike[str], step: int, kind: str, text: str) -> None:
    """Add one event. Raises OSError when it cannot be written."""
    record = {"time": time.time(), "step": step, "kind": kind, "text": text}
    with open(Path(run_dir) / FILE_NAME, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Events in the order they happened; torn lines are left out."""
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events

"""`summary.json`: what a run was and how it ended, for the report and for whoever finds the folder."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from parallel.groups import Groups

from .. import __version__, shapes, vision_shapes
from ..config import Config
from ..log.metrics import replace_file


def write(
    config: Config,
    run_dir: Path,
    groups: Groups,
    started: float,
    step: int,
    bigram_loss: float | None,
    left_out: dict[str, int],
) -> None:
    """Write the summary of a run that ended, or was stopped, at `step`; `started` in epoch seconds.

    `left_out` counts images and documents that could not be used, by reason.
    """
    parameters = {"total": shapes.total(config.model), "active": shapes.active(config.model)}
    if config.vision.enabled:
        parameters |= vision_shapes.count_by_kind(config.vision, config.model.hidden_size)
    facts: dict[str, Any] = {
        "version": __version__,
        "parameters": parameters,
        "world_size": groups.topology.world_size,
        "hardware": _hardware(groups.device),
        "git_commit": _commit(),
        "started": started,
        "finished": time.time(),
        "step": step,
        "tokens_per_step": _tokens_per_step(config),
        "bigram_loss": bigram_loss,
        "left_out": left_out or None,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    replace_file(run_dir / "summary.json", (json.dumps(known, indent=1) + "\n").encode())


def _tokens_per_step(config: Config) -> int:
    data = config.data
    assert config.parallel.data is not None
    return data.sequence_length * data.micro_batch_size * config.run.microbatches * config.parallel.data


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _commit() -> str | None:
    """Commit of the source tree that k3train runs from, if it is one."""
    folder = Path(__file__).parent
    asked = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or None if asked.returncode == 0 else None

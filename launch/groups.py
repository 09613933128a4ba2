"""The groups of `conf/`, its policies of activations, and what each of their files is for. No Hydra."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

POLICIES = "offload"
"""The folder whose files are values of `offload.policy`, not parts of a configuration."""


@cache
def groups() -> dict[str, list[str]]:
    """Config group -> the options shipped in `conf/`."""
    folders = sorted(path for path in _root().iterdir() if path.is_dir() and not path.name.startswith("_"))
    return {folder.name: _options(folder) for folder in folders if folder.name != POLICIES}


@cache
def policies() -> list[str]:
    """Policies of activations that are shipped in `conf/`."""
    return _options(_root() / POLICIES)


def policy_file(name: str) -> Path:
    """The file of a shipped policy."""
    return _root() / POLICIES / f"{name}.yaml"


def summary(group: str, option: str) -> str:
    """The comment at the head of a group's file, or nothing."""
    lines = []
    for line in (_root() / group / f"{option}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line[1:].strip())
    return " ".join(lines)


def _options(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _root() -> Path:
    return Path(str(resources.files("conf")))

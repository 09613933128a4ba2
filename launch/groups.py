"""The groups of `conf/` and what each of their files is for. Reads the package's own files; no Hydra."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path


@cache
def groups() -> dict[str, list[str]]:
    """Config group -> the options shipped in `conf/`."""
    folders = sorted(path for path in _root().iterdir() if path.is_dir() and not path.name.startswith("_"))
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def summary(group: str, option: str) -> str:
    """The comment at the head of a group's file, or nothing."""
    lines = []
    for line in (_root() / group / f"{option}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line[1:].strip())
    return " ".join(lines)


def _root() -> Path:
    return Path(str(resources.files("conf")))

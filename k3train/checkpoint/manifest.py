"""The list of a checkpoint's files with their checksums; a folder that has one is complete."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from . import folders

NAME = "manifest.json"


def checksum(path: Path) -> list[Any]:
    """[size in bytes, SHA-256 in hexadecimal] of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def write(folder: Path, content: dict[str, Any], files: dict[str, list[Any]]) -> None:
    """Write the manifest of a folder and see it to the disk.

    Args:
        content: what else the manifest says.
        files: checksums that are known already; every other file of the folder is read.
    """
    listed = {
        path.name: files.get(path.name) or checksum(path)
        for path in sorted(folder.iterdir())
        if path.name != NAME
    }
    path = folder / NAME
    path.write_text(json.dumps({**content, "files": listed}, indent=1) + "\n")
    folders.sync(path)
    folders.sync(folder)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    content: dict[str, Any] = json.loads((folder / NAME).read_text())
    return content

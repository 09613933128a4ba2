"""Compares a checkpoint with its manifest."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from . import folders, manifest


def verify(folder: Path, *, part: int = 0, parts: int = 1, contents: bool = True) -> list[str]:
    """Problems of a checkpoint, none if it is intact.

    Args:
        contents: read the files; without, their sizes alone are compared.
        part: of `parts` equal shares of the files, the one to read, so that ranks can share the work.
    """
    try:
        listed = manifest.read(folder)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{manifest.NAME} is missing or torn"]
    problems = []
    for name, expected in sorted(listed.items())[part::parts]:
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected[0]:
                problems.append(f"{name} has {size} bytes and should have {expected[0]}")
            elif contents and manifest.checksum(path) != expected:
                problems.append(f"the content of {name} does not match its checksum")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return problems


def newest(root: Path) -> int:
    """Step of the newest checkpoint whose files are all there in their full size.

    Raises:
        UserError: there is none.
    """
    steps = folders.available(root)
    for step in reversed(steps):
        if not verify(folders.complete(root, step), contents=False):
            return step
    if steps:
        problem = verify(folders.complete(root, steps[-1]), contents=False)[0]
        raise UserError(f"none of the {len(steps)} checkpoints in {root} is whole ({problem})")
    raise UserError(f"{root} holds no complete checkpoint; let the run reach checkpoint.every or its end")

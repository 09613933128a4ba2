"""Compares a checkpoint with its manifest."""

from __future__ import annotations

from pathlib import Path

from . import manifest


def verify(folder: Path, *, part: int = 0, parts: int = 1) -> list[str]:
    """Problems of a checkpoint, none if it is intact.

    Args:
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
            elif manifest.checksum(path) != expected:
                problems.append(f"the content of {name} does not match its checksum")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return problems

"""`k3train convert verify`: what is wrong with a Hugging Face folder, found by reading it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch

from ...errors import UserError
from .. import manifest
from .config import read
from .exchange import bar, in_threads
from .keys import Piece, pieces
from .reader import Place, SafetensorsFolder, read_rows
from .writer import CHECKSUMS, read_checksums


def verify_folder(folder: Path, *, workers: int, lenient: bool = False) -> str:
    """Check keys, shapes, dtypes, checksums and that every number is finite; a line that says what was found.

    Raises:
        UserError: all problems, one to a line.
    """
    description = read(folder, lenient=lenient)
    shards = SafetensorsFolder(folder)
    expected = list(pieces(*description))
    shards.check(expected)
    listed = read_checksums(folder)
    held: dict[Path, list[tuple[Piece, list[Place]]]] = defaultdict(list)
    for piece in expected:
        places = [shards.places[stored.key] for stored in piece.stored]
        held[places[0].path].append((piece, places))
    paths = sorted({*(folder / name for name in listed), *shards.files})
    tasks = [(path, listed.get(path.name), held.get(path, [])) for path in paths]
    problems = []
    with bar(len(tasks)) as progress, in_threads(workers) as pool:
        for done, found in enumerate(pool.map(_problems, tasks), 1):
            problems += found
            progress.update(done)
    if problems:
        raise UserError("\n".join(problems))
    sums = f"{len(listed)} checksums agree" if listed else f"no {CHECKSUMS} to compare with"
    form = "MXFP4 experts" if description.layout.packed else description.layout.dtype
    return f"{folder}: {len(shards.places)} tensors in {len(shards.files)} files ({form}), all finite; {sums}"


Task = tuple[Path, str | None, list[tuple[Piece, list[Place]]]]
"""A file, its SHA-256 if it is listed, and what it holds."""


def _problems(task: Task) -> list[str]:
    """What is wrong with one file."""
    path, digest, held = task
    if not path.is_file():
        return [f"{path}: is missing; {CHECKSUMS} lists it"]
    problems = []
    if digest is not None and manifest.checksum(path)[1] != digest:
        problems.append(f"{path}: its content does not match {CHECKSUMS}")
    for piece, places in held:
        try:
            read_rows(piece, places, torch.float32)
        except UserError as error:
            problems.append(str(error))
    return problems

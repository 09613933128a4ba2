"""Looks for code in the pickles of a checkpoint's files, of which none is unpickled beyond its table."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import UserError
from .places import PART_TABLE, REPORTS
from .tensors import TABLE, slice_of
from .unpickling import LEGACY_COMMON, read_table, would_run


class Item(NamedTuple):
    """What `torch.save` has written into a part of a file."""

    name: str
    file: str
    begin: int
    length: int


def code_in(folder: Path) -> list[str]:
    """What would run code, were a checkpoint, or a node's part of one, unpickled; none if nothing would.

    Reads the list of names that each tensor and object of a checkpoint calls for, and no tensor's numbers.
    """
    problems = [f"{LEGACY_COMMON} belongs to no checkpoint of k3train"] * (folder / LEGACY_COMMON).exists()
    try:
        items = list(_items(folder))
    except UserError as error:
        return [*problems, str(error)]
    for item in items:
        if name := _forbidden(folder, item):
            problems.append(would_run(folder / item.file, f"{name} in {item.name}"))
    return problems


def _items(folder: Path) -> Iterator[Item]:
    """All that lies in a checkpoint's files; raises UserError where its table would run code."""
    for path in (folder / TABLE, folder / PART_TABLE):
        if path.is_file():
            with path.open("rb") as file:
                places = read_table(file, path).storage_data or {}
            for index, info in places.items():
                yield Item(index.fqn, info.relative_path, info.offset, info.length)
    if (folder / REPORTS).is_file():
        for report in json.loads((folder / REPORTS).read_text()).values():
            for name, _, _, _, file, begin, length in report["items"]:
                yield Item(name, file, begin, length)


def _forbidden(folder: Path, item: Item) -> str | None:
    """A name that the pickle calls for and no checkpoint has, or why it cannot be looked through."""
    try:
        with (folder / item.file).open("rb") as file:
            found = torch.serialization.get_unsafe_globals_in_checkpoint(
                slice_of(file, item.begin, item.length)  # type: ignore[arg-type]
            )
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        return f"what cannot be read ({str(error).partition(chr(10))[0]})"
    return min(found, default=None)

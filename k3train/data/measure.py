"""The cost in tokens and patches of every document of a source, read once from the headers and kept."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .cache import cache_folder, file_lock
from .documents import Source
from .encode import Encoder, Piece
from .skips import TRANSIENT, ImageError, Skips

# Changes when the same documents would get other costs.
FORMAT = 2
SLOW = 10_000

Costs = list[tuple[int, int]]
"""(tokens, patches) of the pieces of one document."""


@dataclass(frozen=True)
class Measures:
    """Costs of the pieces of d documents; those of document i stand in [offsets[i], offsets[i + 1]).

    `skipped` are (reason, name) of what the headers showed to be of no use.
    """

    offsets: npt.NDArray[np.int64]  # [d + 1]
    tokens: npt.NDArray[np.int32]  # [pieces]
    patches: npt.NDArray[np.int32]  # [pieces]
    skipped: list[tuple[str, str]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, document: int) -> Costs:
        here = slice(int(self.offsets[document]), int(self.offsets[document + 1]))
        return list(zip(self.tokens[here].tolist(), self.patches[here].tolist(), strict=True))


def piece_costs(pieces: list[Piece]) -> Costs:
    """(tokens, patches) of each piece."""
    return [(len(piece.ids), piece.patches) for piece in pieces]


def measure(
    source: Source,
    encoder: Encoder,
    cache_dir: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measures:
    """Costs of all documents of `source`; those with a fingerprint are kept in the cache folder.

    Any number of processes may call this at once: one measures, the others wait. What the headers show to be
    of no use is counted by each. Costs that a file missing or unreadable for now has changed are not kept.

    Raises:
        UserError: a record makes no sense, or the cache folder cannot be written.
    """

    def make() -> Measures:
        if len(source) > SLOW and source.fingerprint is not None:
            say(f"data: measuring the {len(source)} documents of {source.name}, once")
        return _measure(source, encoder)

    if source.fingerprint is None:
        measures = make()
    else:
        measures = kept(_key(source.fingerprint, encoder), cache_dir, make)
    for reason, name in measures.skipped:
        encoder.skips.add(reason, name)
    return measures


def kept(key: str, cache_dir: str | None, make: Callable[[], Measures]) -> Measures:
    """The measures of this key from the cache folder; one process at a time makes what is not there.

    Raises:
        UserError: the cache folder cannot be written.
    """
    folder = cache_folder(cache_dir) / "measures"
    path = folder / f"{key}.npz"
    found = _load(path)
    if found is not None:
        return found
    try:
        folder.mkdir(exist_ok=True)
        with file_lock(path.with_suffix(".lock")):
            found = _load(path)
            if found is None:
                found = make()
                if not any(reason in TRANSIENT for reason, _ in found.skipped):
                    _save(path, found)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); set data.cache_dir") from error
    return found


def _measure(source: Source, encoder: Encoder) -> Measures:
    skips = Skips(lambda _: None)
    encoder = Encoder(encoder.tokenizer, encoder.limits, skips)
    lengths, costs = [], []
    for index in range(len(source)):
        try:
            pieces = encoder.pieces(source.read(index))
        except ImageError as error:
            skips.add(error.reason, f"{source.name} document {index}")
            pieces = []
        lengths.append(len(pieces))
        costs += piece_costs(pieces)
    flat = np.array(costs, np.int32).reshape(-1, 2)
    return Measures(
        np.cumsum([0, *lengths], dtype=np.int64), flat[:, 0].copy(), flat[:, 1].copy(), skips.entries()
    )


def _key(fingerprint: str, encoder: Encoder) -> str:
    tokenizer = encoder.tokenizer
    settings = [FORMAT, fingerprint, tokenizer.fingerprint, encoder.image_id, asdict(encoder.limits)]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]


def _load(path: Path) -> Measures | None:
    try:
        with np.load(path) as stored:
            skipped = [(reason, name) for reason, name in json.loads(str(stored["skipped"]))]
            return Measures(stored["offsets"], stored["tokens"], stored["patches"], skipped)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError):
        return None


def _save(path: Path, measures: Measures) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as output:
        np.savez(
            output,
            offsets=measures.offsets,
            tokens=measures.tokens,
            patches=measures.patches,
            skipped=np.array(json.dumps(measures.skipped)),
        )
    temporary.replace(path)

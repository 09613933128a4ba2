"""Samples of documents with images: packed whole into windows, each a pure function of its index.

A sample is a dict of arrays. Besides tokens, labels [s] int64, loss_mask [s] float32 and sample_id it holds
patches [n, 3*14*14] float32, grids [i, 3] int64 (patches over time, height and width of each item) and
image_positions int64, the places in `tokens` of the placeholders, item by item and row by row. Letters:
s tokens of a sample, n patches, i items (images or clips).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..vision_config import VisionConfig
from .blend import Blend, Windows
from .digits import Digits
from .documents import Document, Picture, Source
from .encode import Encoder, Grid, Piece
from .epochs import EpochWindows
from .folder import ImageFolder
from .images import PATCH_VALUES, ImageLimits
from .joint import Segment, cut
from .measure import Measures, measure, piece_costs
from .packed import Sample
from .skips import ImageError, Skips
from .tokenizer import Tokenizer, image_placeholder
from .webdataset import META_FOLDER, TarShards


@dataclass(frozen=True)
class _Run:
    """A piece as it enters a sample."""

    piece: Piece
    ids: npt.NDArray[np.int64]
    patches: npt.NDArray[np.float32] | None
    answer: bool


def open_source(spec: str, split: str) -> Source:
    """The documents that an entry of `data.images` names; `split` is "train" or "valid".

    `digits`, a folder that `energon prepare` made, or a folder (or file) of JSON lines, which has no splits.

    Raises:
        UserError: it is none of these.
    """
    if spec == "digits":
        return Digits(split)
    path = Path(spec).expanduser()
    if (path / META_FOLDER).is_dir():
        return TarShards(path, split)
    if path.exists():
        return ImageFolder(path)
    raise UserError(
        f"data.images: {spec} does not exist; valid: digits, a folder with index.jsonl, prepared tar shards"
    )


def sample_limits(limits: ImageLimits, sequence_length: int, max_patches: int) -> ImageLimits:
    """`limits` lowered so that one item takes at most half the tokens, and all the patches, of a sample.

    Raises:
        UserError: a sample has no room for the smallest item.
    """
    least = 4 * limits.max_frames
    if max_patches < least or sequence_length < 2:
        raise UserError(
            f"data.max_patches={max_patches} with data.sequence_length={sequence_length}; "
            f"valid: {least} patches or more, for the smallest item, and 2 tokens"
        )
    return replace(
        limits,
        max_patches=min(limits.max_patches, max_patches),
        max_tokens=min(limits.max_tokens, sequence_length // 2),
    )


class ImageKeys(Protocol):
    """The keys of the `data` section that decide how images are read."""

    sequence_length: int
    max_patches: int
    max_image_side: int


def build_encoder(data: ImageKeys, vision: VisionConfig, tokenizer: Tokenizer, skips: Skips) -> Encoder:
    """What turns documents with images into pieces for this tower.

    Raises:
        UserError: the tokenizer has no placeholder, or a sample no room for the smallest image.
    """
    image_placeholder(tokenizer)
    limits = ImageLimits(
        max_side=min(data.max_image_side, vision.rope_max * vision.patch_size),
        max_patches=vision.max_patches,
        max_frames=vision.max_frames,
    )
    return Encoder(tokenizer, sample_limits(limits, data.sequence_length, data.max_patches), skips)


def image_blend(
    specs: Sequence[str],
    weights: Sequence[float] | None,
    split: str,
    encoder: Encoder,
    *,
    sequence_length: int,
    max_patches: int,
    seed: int,
    cache_dir: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Blend[ImageWindows]:
    """Samples of all sources, mixed by weight, or by their tokens when there are no weights.

    Raises:
        UserError: a source cannot be opened or holds nothing that fits.
    """
    windows = []
    for spec in specs:
        source = open_source(spec, split)
        measures = measure(source, encoder, cache_dir, say)
        windows.append(ImageWindows(source, encoder, measures, sequence_length, max_patches, seed))
    return Blend(windows, weights or [int(entry.measures.tokens.sum()) for entry in windows])


class TextWindows:
    """Samples of text in the form of those with images."""

    def __init__(self, windows: Windows, image_id: int) -> None:
        self.windows = windows
        self.image_id = image_id

    def __getitem__(self, index: int) -> Sample:
        """A sample with no items. Raises UserError where its text holds the placeholder of images."""
        sample = self.windows[index]
        if np.any(sample["tokens"] == self.image_id) or np.any(sample["labels"] == self.image_id):
            raise UserError(
                f"a text corpus of data.train holds token {self.image_id}, the placeholder of images"
            )
        return sample | image_arrays([], sample["tokens"], self.image_id)


class ImageWindows(EpochWindows):
    """Sample `i` of one source: whole documents, as many as fit `sequence_length` and `max_patches`.

    A document larger than a sample is cut in its text or between items. Padding has `loss_mask` 0, and so
    have placeholders as labels. An image that fails when it is decoded leaves padding behind and moves
    nothing else. The head of this file says what a sample holds; with `answers` also answer_positions, where
    the label is an answer.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        measures: Measures,
        sequence_length: int,
        max_patches: int,
        seed: int | None,
        *,
        answers: bool = False,
    ) -> None:
        if not measures.tokens.sum():
            raise UserError(f"{source.name} holds no document that can be used ({encoder.skips.summary()})")
        super().__init__(source.name, encoder.skips, len(measures), sequence_length, max_patches, seed)
        self.source, self.encoder, self.measures = source, encoder, measures
        self.answers = answers

    def _segments(self, order: npt.NDArray[np.int64]) -> Iterator[Segment]:
        for document in order.tolist():
            for part in cut(self.measures[document], self.max_tokens, self.max_patches):
                yield Segment(document, *part)

    def _sample(self, segments: list[tuple[int, int, int]]) -> Sample:
        runs = [run for segment in segments for run in self._runs(*segment)]
        s, pad = self.max_tokens, self.encoder.tokenizer.pad_id
        stream = np.concatenate([np.empty(0, np.int64), *(run.ids for run in runs)])
        tokens, labels, loss_mask = np.full(s, pad), np.full(s, pad), np.zeros(s, np.float32)
        tokens[: stream.size] = stream
        labels[: max(0, stream.size - 1)] = stream[1:]
        loss_mask[: max(0, stream.size - 1)] = 1
        loss_mask[labels == self.encoder.image_id] = 0
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.answers:
            asked = [np.full(run.ids.size, run.answer) for run in runs]
            sample["answer_positions"] = np.flatnonzero(np.concatenate([np.empty(0, bool), *asked])) - 1
        items = [(run.piece.grid, run.patches) for run in runs if run.piece.grid and run.patches is not None]
        return sample | image_arrays(items, tokens, self.encoder.image_id)

    def _runs(self, number: int, start: int, stop: int) -> list[_Run]:
        """Tokens [start, stop) of a document, without the items that turn out to be bad and their regions."""
        try:
            document = self.source.read(number)
        except ImageError as error:
            self.encoder.skips.add(error.reason, f"{self.source.name} document {number}")
            return []
        pieces = self.encoder.pieces(document)
        if piece_costs(pieces) != self.measures[number]:
            self.encoder.skips.add("changed since it was measured", document.name)
            return []
        runs: list[_Run] = []
        lost: set[int] = set()
        position = 0
        for piece in pieces:
            ids = piece.ids[max(0, start - position) : max(0, stop - position)]
            position += piece.ids.size
            if ids.size and piece.part not in lost:
                run = self._run(document, piece, ids)
                lost |= {piece.part} if run is None else set()
                runs += [] if run is None else [run]
        return runs if not lost or _worth(document, runs) else []

    def _run(self, document: Document, piece: Piece, ids: npt.NDArray[np.int64]) -> _Run | None:
        if piece.grid is None:
            return _Run(piece, ids, None, piece.part == document.answer)
        picture = document.parts[piece.part]
        assert isinstance(picture, Picture)
        patches = self.encoder.patches(picture, piece.grid)
        return None if patches is None else _Run(piece, ids, patches, False)


def caption_samples(encoder: Encoder, sequence_length: int, max_patches: int) -> list[Sample]:
    """All held-out digits as samples with `answer_positions`: there the label is the byte of the digit.

    Raises:
        UserError: the tokenizer needs more than one token for a digit.
    """
    source = Digits("valid")
    if any(len(encoder.tokenizer.encode(str(digit))) != 1 for digit in range(10)):
        raise UserError("data.images=digits needs a tokenizer with one token for each digit, such as byte")
    windows = ImageWindows(
        source, encoder, measure(source, encoder), sequence_length, max_patches, None, answers=True
    )
    first = windows[0]
    return [first, *(windows[index] for index in range(1, windows.windows))]


def _worth(document: Document, runs: list[_Run]) -> bool:
    """Whether what is left of a document that lost items has something to learn from."""
    if any(run.patches is not None for run in runs):
        return True
    return not document.caption and any(run.piece.part < len(document.parts) for run in runs)


def image_arrays(
    items: Sequence[tuple[Grid, npt.NDArray[np.float32]]], tokens: npt.NDArray[np.int64], image_id: int
) -> Sample:
    """What a sample of `tokens` [s] holds of its items, given as grids and patches, in reading order."""
    return {
        "patches": np.concatenate([np.empty((0, PATCH_VALUES), np.float32), *(p for _, p in items)]),
        "grids": np.array([grid for grid, _ in items], np.int64).reshape(-1, 3),
        "image_positions": np.flatnonzero(tokens == image_id),
    }

"""A document as pieces: runs of text tokens, and images with their size in tokens and patches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .documents import Document, Picture, region_text
from .images import (
    PATCH,
    Blob,
    Header,
    ImageLimits,
    fit,
    load_image,
    read_header,
    same_size,
    spaced,
    to_patches,
)
from .skips import ImageError, Skips
from .tokenizer import Tokenizer, image_placeholder

Ids = npt.NDArray[np.int64]
Grid = tuple[int, int, int]
"""Patches over time, height and width."""


@dataclass(frozen=True)
class Piece:
    """A run of tokens: all placeholders of one item where `grid` is set, else text that may be cut.

    `part` is the index of the document's part that it comes from.
    """

    ids: Ids
    part: int
    grid: Grid | None = None

    @property
    def patches(self) -> int:
        """Patches of the item; 0 for text."""
        return 0 if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]


class Encoder:
    """Documents to pieces under a tokenizer and limits; what cannot be used is counted and left out."""

    def __init__(self, tokenizer: Tokenizer, limits: ImageLimits, skips: Skips) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.skips = skips
        self.image_id = image_placeholder(tokenizer)

    def pieces(self, document: Document) -> list[Piece]:
        """Its pieces, read from the headers of its images; [] when nothing is left to train on.

        Raises:
            UserError: a text encodes to the placeholder of images.
        """
        found: list[Piece] = []
        for index, part in enumerate(document.parts):
            if isinstance(part, Picture):
                found += self._picture(part, index)
            elif part:
                found.append(Piece(self._text(part, document.name), index))
        if document.caption and not any(piece.grid for piece in found):
            return []
        if not found:
            self.skips.add("empty document", document.name)
            return []
        return [*found, Piece(np.array([self.tokenizer.eod_id]), len(document.parts))]

    def patches(self, picture: Picture, grid: Grid) -> npt.NDArray[np.float32] | None:
        """The patches [t*h*w, 3*14*14] of a picture whose piece has this grid; None, and counted, if not."""
        try:
            blobs = self._kept(picture)
            clips = [load_image(blob, self.limits) for blob in blobs]
            patches, found = to_patches(clips[0] if len(clips) == 1 else same_size(clips), self.limits)
            if found != grid:
                raise ImageError("changed since it was measured")
        except ImageError as error:
            self.skips.add(error.reason, picture.name)
            return None
        return patches

    def _kept(self, picture: Picture) -> list[Blob]:
        kept = min(len(picture.blobs), self.limits.max_frames)
        return [picture.blobs[i] for i in spaced(len(picture.blobs), kept)]

    def _picture(self, picture: Picture, part: int) -> Iterator[Piece]:
        try:
            blobs = self._kept(picture)
            header = read_header(blobs[0], self.limits)
            for blob in blobs[1:]:
                read_header(blob, self.limits)
        except ImageError as error:
            self.skips.add(error.reason, picture.name)
            return
        t = header.frames if len(blobs) == 1 else len(blobs)
        h, w = fit(t, header.height, header.width, self.limits)
        yield Piece(np.full(h * w // 4, self.image_id), part, (t, h, w))
        yield from self._regions(picture, part, header, h * PATCH, w * PATCH)

    def _regions(
        self, picture: Picture, part: int, header: Header, height: int, width: int
    ) -> Iterator[Piece]:
        for number, region in enumerate(picture.regions):
            text = region_text(region, header, height, width)
            if text is None:
                self.skips.add("box outside its image", f"{picture.name} box {number}")
            else:
                yield Piece(self._text(text, picture.name), part)

    def _text(self, text: str, name: str) -> Ids:
        # JSON can hold half of a surrogate pair, which is no character.
        ids = self.tokenizer.encode_array(text.encode("utf-8", "replace").decode(), np.int64)
        if np.any(ids == self.image_id):
            raise UserError(f"{name}: data.tokenizer turns its text into the placeholder of images")
        return ids

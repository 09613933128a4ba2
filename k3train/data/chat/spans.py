"""The ids of a chat, with what enters the loss and where images stand. Letters: n tokens, p patches."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ..documents import Document, Picture
from ..encode import Encoder, Grid
from ..images import Blob
from ..skips import ImageError
from ..tokenizer import Tokenizer, chat_structure
from .messages import Chat, Image
from .xtml import Marker, Span, prompt, render

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Tokens that enter the loss together or not at all; of an image its placeholders, and nothing else."""

    ids: Ids  # [n]
    trained: bool = False
    picture: Picture | None = None
    grid: Grid | None = None
    """Patches over time, height and width of the picture."""

    @property
    def patches(self) -> int:
        """Patches of the picture; 0 for text."""
        return 0 if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]


class ChatEncoder:
    """Chats to runs of tokens under a tokenizer; `images` measures pictures, and without it there are none.

    Raises:
        UserError: the tokenizer has no structural tokens.
    """

    def __init__(self, tokenizer: Tokenizer, images: Encoder | None = None) -> None:
        self.tokenizer = tokenizer
        self.images = images
        self.structure = chat_structure(tokenizer)
        self._reserved = frozenset(
            {*self.structure[:4], *(self.structure.media or ()), tokenizer.eod_id, tokenizer.image_id}
            - {None}
        )
        self._markers = dict(zip(Marker, self.structure[:4], strict=True))

    def chat(self, chat: Chat, where: str, folder: Path | None = None) -> list[Run]:
        """The runs of a chat, and the token that ends a document.

        Args:
            where: names the chat in errors.
            folder: what images are relative to.

        Raises:
            UserError: it has images and there is no tower; the tokenizer gives a reserved id for a text.
            ImageError: an image cannot be used.
        """
        end = Run(np.array([self.tokenizer.eod_id]))
        return [*self._runs(render(chat), where, folder), end]

    def prompt(self, chat: Chat, where: str) -> Ids:
        """The tokens [n] behind which an assistant goes on. Raises UserError likewise."""
        runs = self._runs(prompt(chat), where, None)
        return np.concatenate([run.ids for run in runs])

    def _runs(self, spans: Iterable[Span], where: str, folder: Path | None) -> list[Run]:
        runs: list[Run] = []
        held: list[int] = []
        trained = False

        def flush() -> None:
            if held:
                runs.append(Run(np.array(held), trained))
                held.clear()

        for span in spans:
            if isinstance(span.content, Image):
                flush()
                runs += self._image(span.content, where, folder)
                continue
            if span.trained != trained:
                flush()
                trained = span.trained
            if isinstance(span.content, Marker):
                held.append(self._markers[span.content])
            else:
                held += self._text(span.content, where)
        flush()
        return runs

    def _text(self, text: str, where: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        if not self._reserved.isdisjoint(ids):
            raise UserError(f"{where}: data.tokenizer turns its text into a structural token; use another")
        return ids

    def _image(self, image: Image, where: str, folder: Path | None) -> list[Run]:
        if self.images is None:
            raise UserError(f"{where} has an image, and there is no tower to see it: add vision=tiny")
        name = f"{where} {image.path}"
        picture = Picture(name, (_inside(folder, image.path),))
        found = self.images.pieces(Document(name, (picture,), caption=True))
        pieces = [piece for piece in found if piece.grid is not None]
        if not pieces:
            raise ImageError("an image that cannot be used")
        placeholders = Run(pieces[0].ids, picture=picture, grid=pieces[0].grid)
        if self.structure.media is None:
            return [placeholders]
        begin, content, end = self.structure.media
        word = self.tokenizer.encode("image")
        return [Run(np.array([begin, *word, content])), placeholders, Run(np.array([end]))]


def flat(runs: Iterable[Run]) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Ids and whether each enters the loss, [n] both."""
    kept = list(runs)
    ids = np.concatenate([np.empty(0, np.int64), *(run.ids for run in kept)])
    trained = np.concatenate([np.empty(0, bool), *(np.full(run.ids.size, run.trained) for run in kept)])
    return ids, trained


def shortened(runs: list[Run], length: int) -> list[Run]:
    """The first `length` tokens, the last of them the one that ends a document; no image is cut."""
    if sum(run.ids.size for run in runs) <= length:
        return runs
    kept: list[Run] = []
    left = length - 1
    for run in runs[:-1]:
        if run.grid is not None and run.ids.size > left:
            break
        kept.append(replace(run, ids=run.ids[:left]))
        left -= kept[-1].ids.size
    return [*(run for run in kept if run.ids.size), runs[-1]]


def _inside(folder: Path | None, path: str) -> Blob:
    relative = os.path.normpath(path)
    if folder is None or os.path.isabs(relative) or relative.split(os.sep)[0] == os.pardir:
        return ImageError("outside the folder")
    return folder / relative

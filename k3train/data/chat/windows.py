"""Samples of chats: whole chats packed into windows, each sample a pure function of its index.

tokens, labels [s] int64, loss_mask [s] float32 (1 where the label is part of an assistant's answer) and
sample_id; with a tower also what `multimodal.py` says of images. Letters: s tokens of a sample, n chats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ..datasets import TRAIN_SALT, VALID_SALT, Samples
from ..encode import Encoder
from ..epochs import EpochWindows
from ..joint import Segment
from ..measure import SLOW, Measures, kept
from ..multimodal import image_arrays
from ..packed import Sample
from ..skips import ImageError, Skips
from ..tokenizer import Tokenizer
from .source import TRAIN, VALID, ChatFiles, find_chats
from .spans import ChatEncoder, Run, flat, shortened

# Changes when the same chats would get other costs.
FORMAT = 1
TOO_LONG, NOTHING, TOO_MANY_PATCHES = "too long", "nothing to learn", "more patches than data.max_patches"


class ChatKeys(Protocol):
    """The keys of the `data` section that are read here."""

    path: list[str]
    valid_path: list[str]
    held_out: float
    malformed: str
    overlong: str
    sequence_length: int
    max_patches: int
    cache_dir: str | None


@dataclass(frozen=True)
class ChatLimits:
    """What fits a sample, and what is done with a chat that does not, or that cannot be read."""

    tokens: int
    patches: int
    overlong: str = "cut"
    """cut (its beginning is kept) or drop."""
    malformed: str = "stop"
    """stop (an error) or skip."""


def build_chats(
    data: ChatKeys,
    tokenizer: Tokenizer,
    images: Encoder | None,
    skips: Skips,
    seed: int,
    num_train_samples: int,
    num_valid_samples: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Samples, Samples]:
    """Training and validation samples of the chats that a `data` configuration names.

    `images` measures the pictures of chats where there is a tower; `skips` counts what is left out.

    Raises:
        UserError: a file cannot be read, a chat is malformed (with malformed=stop), or nothing is left.
    """
    encoder = ChatEncoder(tokenizer, images)
    limits = ChatLimits(data.sequence_length, data.max_patches, data.overlong, data.malformed)
    paths = find_chats(data.path, "data.path", data.cache_dir)
    if data.valid_path:
        train = ChatFiles(paths)
        valid = ChatFiles(find_chats(data.valid_path, "data.valid_path", data.cache_dir))
    else:
        train = ChatFiles(paths, TRAIN, data.held_out)
        valid = ChatFiles(paths, VALID, data.held_out)

    def windows(source: ChatFiles, salt: int) -> ChatWindows:
        measures = measure(source, encoder, limits, data.cache_dir, say)
        return ChatWindows(source, encoder, measures, limits, skips, seed + salt)

    first = windows(train, TRAIN_SALT)
    say(f"data: {first.described()}")
    return Samples(first, num_train_samples), Samples(windows(valid, VALID_SALT), num_valid_samples)


def measure(
    source: ChatFiles,
    encoder: ChatEncoder,
    limits: ChatLimits,
    cache_dir: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measures:
    """Tokens of each chat, as those before the first that is learnt and the rest, and its patches.

    Nothing stands for what is malformed, in `skipped` with its reason. Kept in the cache folder.

    Raises:
        UserError: a chat is malformed and limits.malformed is stop.
    """

    def make() -> Measures:
        if len(source) > SLOW:
            say(f"data: reading the {len(source)} chats of {source.name}, once")
        return _measure(source, encoder, limits.malformed)

    return kept(_key(source, encoder, limits.malformed), cache_dir, make)


def _measure(source: ChatFiles, encoder: ChatEncoder, malformed: str) -> Measures:
    skips = Skips(lambda _: None)
    images = encoder.images and Encoder(encoder.images.tokenizer, encoder.images.limits, skips)
    quiet = ChatEncoder(encoder.tokenizer, images)
    costs: list[tuple[int, int]] = []
    lengths = []
    for index in range(len(source)):
        try:
            runs = quiet.chat(source.read(index), source.where(index), source.folder(index))
            found = _costs(runs)
        except UserError as error:
            if malformed == "stop":
                raise UserError(f"{error}; data.malformed=skip leaves such lines out") from error
            skips.add("malformed", str(error))
            found = []
        except ImageError as error:
            skips.add(error.reason, source.where(index))
            found = []
        lengths.append(len(found))
        costs += found
    table = np.array(costs, np.int32).reshape(-1, 2)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    return Measures(offsets, table[:, 0].copy(), table[:, 1].copy(), skips.entries())


def _costs(runs: list[Run]) -> list[tuple[int, int]]:
    """(tokens, 0) before the first token that is learnt, and (tokens, patches) of the rest and of all."""
    _, trained = flat(runs)
    first = int(trained.argmax()) if trained.any() else trained.size
    return [(first, 0), (trained.size - first, sum(run.patches for run in runs))]


def _key(source: ChatFiles, encoder: ChatEncoder, malformed: str) -> str:
    images = asdict(encoder.images.limits) if encoder.images else None
    settings = [
        FORMAT,
        source.fingerprint,
        encoder.tokenizer.fingerprint,
        encoder.structure,
        images,
        malformed,
    ]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]


class ChatWindows(EpochWindows):
    """Sample `i` of a source: whole chats, in another order every epoch.

    A chat longer than a sample is cut behind what fits, or left out. A chat that turns out to be bad when it
    is read leaves padding behind and moves nothing else.
    """

    def __init__(
        self,
        source: ChatFiles,
        encoder: ChatEncoder,
        measures: Measures,
        limits: ChatLimits,
        skips: Skips,
        seed: int | None,
    ) -> None:
        self.source, self.encoder, self.measures, self.limits = source, encoder, measures, limits
        self.tokens = self._sizes(skips)  # [n]
        self.cut = sum(sum(t for t, _ in measures[i]) > size > 0 for i, size in enumerate(self.tokens))
        if not self.tokens.any():
            raise UserError(f"{source.name} holds no chat that can be used ({skips.summary()})")
        super().__init__(source.name, skips, len(source), limits.tokens, limits.patches, seed)

    def described(self) -> str:
        """How many chats there are, what of them is used, and how they are packed."""
        used = int((self.tokens > 0).sum())
        parts = [f"{len(self.source)} chats of {self.source.name}", f"{int(self.tokens.sum())} tokens"]
        if self.cut:
            parts.append(f"{self.cut} cut at data.sequence_length={self.limits.tokens}")
        left_out = f"; {self.skips.summary()}" if used < len(self.source) else ""
        return ", ".join(parts) + left_out

    def _sizes(self, skips: Skips) -> npt.NDArray[np.int64]:
        """Tokens of each chat as they enter a sample; 0 where it is left out, and then counted."""
        for reason, name in self.measures.skipped:
            skips.add(reason, name)
        sizes = np.zeros(len(self.source), np.int64)
        for index in range(len(self.source)):
            costs = self.measures[index]
            if not costs:
                continue
            if unfit := self._unfit(costs):
                skips.add(unfit, self.source.where(index))
            else:
                sizes[index] = min(sum(tokens for tokens, _ in costs), self.limits.tokens)
        return sizes

    def _unfit(self, costs: list[tuple[int, int]]) -> str | None:
        (first, _), (rest, patches) = costs
        if not rest:
            return NOTHING
        if patches > self.limits.patches:
            return TOO_MANY_PATCHES
        if first + rest <= self.limits.tokens:
            return None
        # The last token of a sample ends the document.
        kept = self.limits.overlong == "cut" and first < self.limits.tokens - 1
        return None if kept else TOO_LONG

    def _segments(self, order: npt.NDArray[np.int64]) -> Iterator[Segment]:
        for index in order.tolist():
            if size := int(self.tokens[index]):
                yield Segment(index, 0, size, sum(patches for _, patches in self.measures[index]))

    def _sample(self, segments: list[tuple[int, int, int]]) -> Sample:
        chats = [self._chat(index) for index, _, _ in segments]
        runs = [run for chat, _ in chats for run in chat]
        stream, trained = flat(runs)
        s, pad = self.max_tokens, self.encoder.tokenizer.pad_id
        tokens, labels, loss_mask = np.full(s, pad), np.full(s, pad), np.zeros(s, np.float32)
        tokens[: stream.size] = stream
        labels[: max(0, stream.size - 1)] = stream[1:]
        loss_mask[: max(0, stream.size - 1)] = trained[1:]
        sample: Sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.encoder.images is None:
            return sample
        patches = [found for _, pictures in chats for found in pictures]
        grids = [run.grid for run in runs if run.grid is not None]
        items = list(zip(grids, patches, strict=True))
        return sample | image_arrays(items, tokens, self.encoder.images.image_id)

    def _chat(self, index: int) -> tuple[list[Run], list[npt.NDArray[np.float32]]]:
        """The runs of a chat and the patches of its pictures; nothing of a chat that cannot be used."""
        where = self.source.where(index)
        try:
            runs = self.encoder.chat(self.source.read(index), where, self.source.folder(index))
            if _costs(runs) != self.measures[index]:
                raise ImageError("changed since it was measured")
            runs = shortened(runs, self.limits.tokens)
            return runs, [self._patches(run) for run in runs if run.grid is not None]
        except UserError:
            self.skips.add("changed since it was measured", where)
        except ImageError as error:
            self.skips.add(error.reason, where)
        return [], []

    def _patches(self, run: Run) -> npt.NDArray[np.float32]:
        assert self.encoder.images is not None and run.picture is not None and run.grid is not None
        found = self.encoder.images.patches(run.picture, run.grid)
        if found is None:
            raise ImageError("an image that cannot be used")
        return found

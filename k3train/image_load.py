"""The images that a plan assumes in every micro-batch; a run's own come from its data. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .config import Config
from .errors import UserError
from .microbatch import tokens_per_microbatch
from .vision_shapes import Grid, GridError, check_grid, patches, tokens

LARGEST_SIDE = 32
"""Patches along each side of the items that are assumed where none are stated: 448 pixels of MoonViT's."""

FORM = "COUNTxROWSxCOLUMNS"


@dataclass(frozen=True)
class ImageLoad:
    """`count` equal items in each micro-batch."""

    count: int
    grid: Grid
    """(t, h, w) in patches."""
    stated: bool
    """Whether a person named it, or it follows from the configuration."""

    @property
    def grids(self) -> list[Grid]:
        """Of the items of one micro-batch."""
        return [self.grid] * self.count

    def describe(self) -> str:
        """`4 images of 64x48 patches`."""
        _, h, w = self.grid
        return f"{self.count} image{'s' if self.count > 1 else ''} of {h}x{w} patches"


def stated_load(config: Config, text: str) -> ImageLoad:
    """The load that `images=COUNTxROWSxCOLUMNS` states.

    Raises:
        UserError: another form, no tower, an item that it cannot take, or more than a micro-batch holds.
    """
    given = f"images={text}"
    if not config.vision.enabled:
        raise UserError(
            f"{given}: needs a vision tower; add vision=tiny or vision=moonvit_v2, and data.images"
        )
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,6})", text)
    if not found or not int(found[1]):
        raise UserError(f"{given}: takes {FORM} in patches, for example 4x64x48")
    count, h, w = map(int, found.groups())
    try:
        check_grid(config.vision, (1, h, w))
    except GridError as error:
        raise UserError(f"{given}: {error}") from error
    needed, room = count * tokens(config.vision, (1, h, w)), tokens_per_microbatch(config)
    if needed > room:
        raise UserError(
            f"{given}: {needed:,} tokens, and a micro-batch has {room:,}; state fewer or smaller ones"
        )
    return ImageLoad(count, (1, h, w), stated=True)


def default_load(config: Config) -> ImageLoad:
    """Every micro-batch holds data.image_share of what it could hold, in square items of at most 32 x 32.

    It could hold data.max_patches in each sequence, or as many patches as merge into its tokens.
    """
    vision, data = config.vision, config.data
    merged = vision.merge**2
    sample = min(data.max_patches, data.sequence_length * merged)
    budget = int(data.image_share * data.micro_batch_size * sample)
    # One item takes at most half of a sequence, as `data.multimodal.sample_limits` has it.
    largest = min(budget, sample, vision.max_patches, data.sequence_length // 2 * merged)
    side = min(LARGEST_SIDE, vision.rope_max, math.isqrt(largest)) // vision.merge * vision.merge
    side = max(side, vision.merge)
    return ImageLoad(max(1, budget // side**2), (1, side, side), stated=False)


def bundled(grids: Sequence[Grid], bundles: Sequence[Sequence[Sequence[int]]]) -> list[list[list[Grid]]]:
    """Grids of each part of each micro-batch, all of which have the items `grids`."""
    return [[[grids[item] for item in part] for part in parts] for parts in bundles]


def load_assumptions(config: Config, load: ImageLoad, *, measured: bool) -> list[str]:
    """What a plan takes for granted about images, a line each."""
    if measured:
        source = "the tower takes as long for each micro-batch as in the run on average"
    elif load.stated:
        source = "as stated"
    else:
        source = f"data.image_share of data.max_patches; images={FORM} states others"
    total = sum(map(patches, load.grids))
    made = sum(tokens(config.vision, grid) for grid in load.grids)
    return [
        f"every micro-batch has {load.describe()} ({total:,} patches, {made:,} of its tokens): {source}",
        "the tower's activations count at their own peak on each rank, which need not be that of the layers",
    ]

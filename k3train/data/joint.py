"""Packing by two costs: segments of documents into samples that hold so many tokens and so many patches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

# More fill a little better and mix less, as a document then waits longer for its sample.
OPEN_WINDOWS = 8


class Segment(NamedTuple):
    """Tokens [start, stop) of a document with the patches of the items in them; usually all of it."""

    document: int
    start: int
    stop: int
    patches: int


def cut(
    costs: Iterable[tuple[int, int]], max_tokens: int, max_patches: int
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, patches) of the parts of one document that fit a sample each, from left to right.

    `costs` are (tokens, patches) of its pieces; text, which has no patches, may be cut anywhere, an item
    nowhere, and none is larger than a sample.
    """
    start = position = held = 0
    for tokens, patches in costs:
        assert not patches or (tokens <= max_tokens and patches <= max_patches)
        if patches and (position + tokens - start > max_tokens or held + patches > max_patches):
            yield start, position, held
            start, held = position, 0
        held += patches
        position += tokens
        while position - start > max_tokens:
            yield start, start + max_tokens, held
            start, held = start + max_tokens, 0
    if position > start:
        yield start, position, held


def pack(segments: Iterable[Segment], max_tokens: int, max_patches: int) -> Iterator[list[Segment]]:
    """Windows of whole segments: each goes into the first open window with room for both of its costs.

    With eight windows open and none with room, the one with the most tokens is closed.
    """
    windows: list[list[Segment]] = []
    room: list[list[int]] = []  # tokens, patches
    for segment in segments:
        tokens, patches = segment.stop - segment.start, segment.patches
        fits = (i for i, (t, p) in enumerate(room) if t >= tokens and p >= patches)
        chosen = next(fits, None)
        if chosen is None:
            if len(windows) == OPEN_WINDOWS:
                fullest = min(range(OPEN_WINDOWS), key=lambda i: room[i][0])
                room.pop(fullest)
                yield windows.pop(fullest)
            chosen = len(windows)
            windows.append([])
            room.append([max_tokens, max_patches])
        windows[chosen].append(segment)
        room[chosen][0] -= tokens
        room[chosen][1] -= patches
        assert min(room[chosen]) >= 0, "a segment larger than a sample"
        if not room[chosen][0]:
            room.pop(chosen)
            yield windows.pop(chosen)
    yield from windows

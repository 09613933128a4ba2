"""Documents of text, images and short videos, and the records that describe them.

A record is a line of an index or the `json` member of a sample in a tar shard. It is either a caption,
`{"image": "a.png", "text": "a cat"}`, or parts in reading order,
`{"parts": [{"text": "before"}, {"image": "a.png"}, {"video": ["f0.png", "f1.png"]}, {"text": "after"}]}`.
An image may carry `"boxes": [{"label": "cat", "box": [x0, y0, x1, y1]}]` in pixels of the upright image, or
of the pixels as stored with `"boxes_in": "stored"`; `box_normalised` in place of `box` runs from 0 to 1.
No text, no parts or no frames make an empty document, or an empty part, and no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import UserError
from .images import Blob, Header

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

REGION = "{label} [{x0}, {y0}, {x1}, {y1}] [{u0:.3f}, {v0:.3f}, {u1:.3f}, {v1:.3f}]\n"
"""A region as text: pixels of the image as the tower sees it, then shares of its width and height."""


@dataclass(frozen=True)
class Region:
    """A labelled rectangle. `stored`: the coordinates are of the pixels before EXIF turns them."""

    label: str
    box: Box
    normalised: bool = False
    stored: bool = False


@dataclass(frozen=True)
class Picture:
    """One image (one blob, several when it is a video given as frames), with regions in it."""

    name: str
    blobs: tuple[Blob, ...]
    regions: tuple[Region, ...] = ()


Part = str | Picture


@dataclass(frozen=True)
class Document:
    """Parts in reading order. A `caption` is worth nothing without its image."""

    name: str
    parts: tuple[Part, ...]
    caption: bool = False
    answer: int | None = None
    """Index of the part whose tokens a caption evaluation asks for."""


class Source(Protocol):
    """Documents by index. `fingerprint` changes when the documents do; None: too small to keep measures."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str | None: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Document:
        """Document `index`. Raises ImageError where it cannot be read, UserError where it makes no sense."""
        ...


def parse_record(record: Any, name: str, resolve: Callable[[str], Blob]) -> Document:
    """The document of a record; `resolve` finds what it names.

    Raises:
        UserError: the record is none of the two forms above.
    """
    if not isinstance(record, dict):
        raise UserError(f'{name}: expected an object like {{"image": .., "text": ..}}, not {record!r:.60}')
    if "parts" in record:
        if not isinstance(record["parts"], list):
            raise UserError(f"{name}: `parts` must be a list, not {record['parts']!r:.60}")
        return Document(name, tuple(_part(part, name, resolve) for part in record["parts"]))
    text = record.get("text", "")
    if not isinstance(text, str):
        raise UserError(f"{name}: `text` must be a string, not {text!r:.60}")
    if "image" not in record and "video" not in record:
        if "text" not in record:
            raise UserError(f"{name}: expected `image`, `video`, `text` or `parts`, found {sorted(record)}")
        return Document(name, (text,) if text else ())
    picture = _picture(record, name, resolve)
    if not isinstance(picture, Picture):
        return Document(name, ())
    return Document(name, (picture, text) if text else (picture,), caption=True)


def region_text(region: Region, header: Header, height: int, width: int) -> str | None:
    """The region in an image resized to `height` x `width` pixels; None when nothing of it is inside."""
    shares = upright(region, header)
    if not all(map(math.isfinite, shares)):
        return None
    across, down = sorted(map(_clip, shares[::2])), sorted(map(_clip, shares[1::2]))
    corners = u0, v0, u1, v1 = across[0], down[0], across[1], down[1]
    if u0 == u1 or v0 == v1:
        return None
    x0, y0, x1, y1 = (round(c * side) for c, side in zip(corners, (width, height) * 2, strict=True))
    return REGION.format(label=region.label, x0=x0, y0=y0, x1=x1, y1=y1, u0=u0, v0=v0, u1=u1, v1=v1)


def upright(region: Region, header: Header) -> Box:
    """The box as shares of the upright image's width and height."""
    x0, y0, x1, y1 = region.box
    turned = region.stored and header.orientation >= 5
    width, height = (header.height, header.width) if turned else (header.width, header.height)
    if not region.normalised:
        x0, y0, x1, y1 = x0 / width, y0 / height, x1 / width, y1 / height
    if not region.stored:
        return x0, y0, x1, y1
    return (*_turn(x0, y0, header.orientation), *_turn(x1, y1, header.orientation))


def _turn(x: float, y: float, orientation: int) -> tuple[float, float]:
    """Where a point of the stored image, in shares of its sides, lies in the upright one."""
    if orientation in (2, 3, 7, 8):
        x = 1 - x
    if orientation in (3, 4, 6, 7):
        y = 1 - y
    return (y, x) if orientation >= 5 else (x, y)


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


def _part(part: Any, name: str, resolve: Callable[[str], Blob]) -> Part:
    if isinstance(part, dict) and isinstance(part.get("text"), str) and len(part) == 1:
        return part["text"]
    if isinstance(part, dict) and ("image" in part or "video" in part):
        return _picture(part, name, resolve)
    raise UserError(f"{name}: a part must hold `text`, `image` or `video`, not {part!r:.60}")


def _picture(part: dict[str, Any], name: str, resolve: Callable[[str], Blob]) -> Part:
    """The picture of a part; no text where it is a video of no frames."""
    files = part.get("image", part.get("video"))
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise UserError(f"{name}: `image` must be a file name, and `video` one or a list, not {files!r:.60}")
    if "image" in part and len(files) != 1:
        raise UserError(f"{name}: `image` is one file; name frames as `video`, or several parts")
    regions = _regions(part, name)
    if not files:
        return ""
    return Picture(f"{name} {files[0]}", tuple(resolve(file) for file in files), regions)


def _regions(part: dict[str, Any], name: str) -> tuple[Region, ...]:
    frame = part.get("boxes_in", "upright")
    if frame not in ("upright", "stored"):
        raise UserError(f"{name}: boxes_in={frame!r}; valid: upright, stored")
    boxes = part.get("boxes", [])
    if not isinstance(boxes, list):
        raise UserError(f"{name}: `boxes` must be a list, not {boxes!r:.60}")
    return tuple(_region(entry, frame == "stored", name) for entry in boxes)


def _region(entry: Any, stored: bool, name: str) -> Region:
    normalised = isinstance(entry, dict) and "box" not in entry
    box = entry.get("box_normalised" if normalised else "box") if isinstance(entry, dict) else None
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, int | float) for v in box):
        raise UserError(f"{name}: a box needs `box` or `box_normalised` of four numbers, not {entry!r:.60}")
    left, top, right, bottom = map(_float, box)
    return Region(str(entry.get("label", "")), (left, top, right, bottom), normalised, stored)


def _float(value: float) -> float:
    """Infinity, which lies outside every image, for an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf

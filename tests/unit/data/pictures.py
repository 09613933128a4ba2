"""Generated image files for the tests of image data."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as the content of a file."""
    output = io.BytesIO()
    image.save(output, kind, **options)
    return output.getvalue()


def plain(width: int = 28, height: int = 28, colour: Any = RED, mode: str = "RGB") -> Image.Image:
    """One colour."""
    return Image.new(mode, (width, height), colour)


def quarters(width: int = 40, height: int = 20) -> Image.Image:
    """Red, green, blue and white quarters in reading order, so that every turn shows."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :] = RED, GREEN
    pixels[height // 2 :, : width // 2], pixels[height // 2 :, width // 2 :] = BLUE, WHITE
    return Image.fromarray(pixels)


def with_orientation(image: Image.Image, orientation: int, kind: str = "PNG") -> bytes:
    """The image with an EXIF tag that says how it is to be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Random pixels, which do not compress."""
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8))


def animation(colours: list[Any], kind: str = "GIF", width: int = 28, height: int = 28) -> bytes:
    """One plain frame for each colour."""
    frames = [plain(width, height, colour) for colour in colours]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, loop=0)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(name: bytes, content: bytes) -> bytes:
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")

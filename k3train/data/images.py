"""Image files to upright RGB frames, and those to the patches that the vision tower reads.

Letters: t frames, H x W pixels, h x w patches. Imports no torch.
"""

from __future__ import annotations

import io
import math
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from .skips import ImageError

PATCH = 14
# The projector gathers 2 x 2 patches into one token.
CELL = 2 * PATCH
PATCH_VALUES = 3 * PATCH * PATCH

# Formats that Pillow decodes by itself; EPS, for one, would start another program.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
ANIMATED = ("PNG", "GIF", "WEBP")
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
ORIENTATION_TAG = 0x0112
TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What in a PNG may hold an orientation. Without it, Pillow would decode the pixels to look behind them.
PNG_ORIENTATION = (b"eXIf", b"Raw profile type", b"tiff:Orientation")

Frames = npt.NDArray[np.uint8]
Blob = Path | bytes | Frames | ImageError
"""A file, its content, decoded frames [t, H, W, 3], or why there is none."""

# Pillow warns of what it can still read; what it cannot is an error here, with a reason.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True)
class ImageLimits:
    """What is accepted, and how large an item may get. K3: 3584 px a side, 65,536 patches, 4 frames."""

    max_side: int = 3584
    """Pixels of the longer side after resizing."""
    max_patches: int = 65536
    """Patches of one item, over all its frames."""
    max_tokens: int = 16384
    """Tokens of one item."""
    max_frames: int = 4
    """Frames kept of an animation, evenly spaced."""
    max_pixels: int = 89_478_485
    """Pixels of one frame as stored; all frames of an animation may have eight times as many."""
    max_bytes: int = 1 << 28
    """Bytes of a file."""


@dataclass(frozen=True)
class Header:
    """What an image says about itself. `height` and `width` [pixels] are upright, as it is displayed."""

    frames: int
    height: int
    width: int
    orientation: int
    """EXIF orientation that leads from the stored pixels to the upright ones; 1 when there is none."""


def read_header(blob: Blob, limits: ImageLimits) -> Header:
    """Frames that would be kept, upright size and orientation, without decoding where the format allows.

    Raises:
        ImageError: as `load_image`, as far as the header shows it.
    """
    if isinstance(blob, np.ndarray):
        return Header(blob.shape[0], blob.shape[1], blob.shape[2], 1)
    with _opened(blob, limits) as (image, data):
        return _header(image, data, limits)


def load_image(blob: Blob, limits: ImageLimits) -> Frames:
    """Upright RGB frames [t, H, W, 3] of an image or a short animation, on white where it is transparent.

    Raises:
        ImageError: missing, unreadable, empty, huge, unknown format, truncated, corrupt or out of memory.
    """
    if isinstance(blob, np.ndarray):
        return blob
    with _opened(blob, limits) as (image, data):
        header = _header(image, data, limits)
        total = _frame_count(image)
        method = None if image.format == "TIFF" else TRANSPOSES.get(header.orientation)
        frames = []
        for index in spaced(total, header.frames):
            if total > 1:
                image.seek(index)
            image.load()
            frame = _to_rgb(image)
            frames.append(np.asarray(frame if method is None else frame.transpose(method)))
        return np.stack(frames)


def spaced(total: int, kept: int) -> list[int]:
    """`kept` of `total` indices, evenly spaced, the first and the last among them."""
    return [0] if kept == 1 else [round(i * (total - 1) / (kept - 1)) for i in range(kept)]


def fit(frames: int, height: int, width: int, limits: ImageLimits) -> tuple[int, int]:
    """Rows and columns of patches, both even, that keep area and aspect as nearly as the limits let them."""
    most = max(1, min(limits.max_tokens, limits.max_patches // (4 * frames)))
    longest = max(1, limits.max_side // CELL)
    scale = min(1.0, limits.max_side / max(height, width), CELL * math.sqrt(most / (height * width)))
    rows, columns = (min(longest, max(1, round(side * scale / CELL))) for side in (height, width))
    if rows * columns > most:
        rows, columns = (rows, most // rows) if rows <= columns else (most // columns, columns)
    return 2 * rows, 2 * columns


def to_patches(frames: Frames, limits: ImageLimits) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
    """Resize `frames` [t, H, W, 3] and cut them.

    Returns:
        patches [t*h*w, 3*14*14] in [-1, 1], frame by frame and row by row, each in the order (channel, row,
        column); and (t, h, w).
    """
    t, height, width, _ = frames.shape
    h, w = fit(t, height, width, limits)
    size = (w * PATCH, h * PATCH)
    resized = [
        np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC))
        if size != (width, height)
        else frame
        for frame in frames
    ]
    cut = np.stack(resized).reshape(t, h, PATCH, w, PATCH, 3).transpose(0, 1, 3, 5, 2, 4)
    patches = cut.reshape(t * h * w, PATCH_VALUES).astype(np.float32)
    return patches / 127.5 - 1, (t, h, w)


def same_size(clips: list[Frames]) -> Frames:
    """Frames of several files as one clip [t, H, W, 3], resized to the first."""
    height, width = clips[0].shape[1:3]
    frames = [Image.fromarray(clip[0]) for clip in clips]
    return np.stack([np.asarray(f.resize((width, height), Image.Resampling.BICUBIC)) for f in frames])


@contextmanager
def _opened(blob: Path | bytes | ImageError, limits: ImageLimits) -> Iterator[tuple[Image.Image, bytes]]:
    """The image and its bytes; whatever goes wrong inside becomes an ImageError."""
    if isinstance(blob, ImageError):
        raise blob
    data = blob if isinstance(blob, bytes) else _read(blob, limits)
    if not data:
        raise ImageError("empty")
    if len(data) > limits.max_bytes:
        raise ImageError("huge")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image, data
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError("huge") from error
    except UnidentifiedImageError as error:
        raise ImageError("unknown format") from error
    except MemoryError as error:
        raise ImageError("out of memory") from error
    except Exception as error:  # decoders raise nearly anything for damaged files
        text = str(error).lower()
        cut_off = isinstance(error, EOFError) or "truncated" in text or "no more images" in text
        raise ImageError("truncated" if cut_off else "corrupt") from error


def _read(path: Path, limits: ImageLimits) -> bytes:
    try:
        status = path.stat()
        # Reading a pipe or a device could wait for ever.
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("not a file")
        if status.st_size > limits.max_bytes:
            raise ImageError("huge")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ImageError("missing") from error
    except (OSError, ValueError) as error:
        raise ImageError("unreadable") from error


def _header(image: Image.Image, data: bytes, limits: ImageLimits) -> Header:
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError("empty")
    if width * height > limits.max_pixels:
        raise ImageError("huge")
    total = _frame_count(image)
    # Frame n of an animation needs all before it.
    if total > 1 and total * width * height > 8 * limits.max_pixels:
        raise ImageError("huge")
    orientation = _orientation(image, data)
    # Pillow reports a TIFF's upright size, and turns its pixels, by itself.
    if orientation >= 5 and image.format != "TIFF":
        width, height = height, width
    return Header(min(total, limits.max_frames), height, width, orientation)


def _frame_count(image: Image.Image) -> int:
    # A TIFF's further pages and an MPO's further pictures are no animation.
    return int(getattr(image, "n_frames", 1)) if image.format in ANIMATED else 1


def _orientation(image: Image.Image, data: bytes) -> int:
    if image.format == "PNG" and not any(mark in data for mark in PNG_ORIENTATION):
        return 1
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # a damaged EXIF block says nothing; the pixels may be fine
        return 1
    return value if value in TRANSPOSES else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_grey(image)).convert("RGB")
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")


def _to_grey(image: Image.Image) -> npt.NDArray[np.uint8]:
    """8-bit grey of 16-bit, 32-bit and float pixels; what has no natural range is stretched to its own."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0, neginf=0)
    low, high = float(values.min()), float(values.max())
    if image.mode != "F" and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    elif image.mode == "F" and low >= 0 and high <= 255:
        low, high = 0.0, 1.0 if high <= 1 else 255.0
    return np.rint((values - low) * (255 / max(high - low, 1e-300))).astype(np.uint8)

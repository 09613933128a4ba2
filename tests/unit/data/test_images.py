"""Every kind of image file is read as it looks, or refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from k3train.data.images import ImageLimits, fit, load_image, read_header, spaced, to_patches
from k3train.data.skips import ImageError, Skips
from tests.unit.data.pictures import (
    BLUE,
    GREEN,
    RED,
    WHITE,
    animation,
    encoded,
    noise,
    plain,
    png_header,
    quarters,
    with_orientation,
)

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")
LIMITS = ImageLimits()


def colour(content: bytes) -> list[int]:
    frames = load_image(content, LIMITS)
    assert frames.dtype == np.uint8 and frames.shape[0] == 1 and frames.shape[3] == 3
    return frames[0, 14, 14].tolist()


def reason(content: bytes | Path, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(ImageError) as caught:
        load_image(content, limits)
    return caught.value.reason


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind: str) -> None:
    image = plain(colour=(0, 255, 255, 0), mode="CMYK")  # no cyan, all magenta and yellow: red
    red, green, blue = colour(encoded(image, kind))
    assert red > 245 and green < 10 and blue < 10


@pytest.mark.parametrize("value", [0, 257, 32896, 65535])
def test_16_bit_grey_keeps_its_brightness(value: int) -> None:
    content = encoded(Image.fromarray(np.full((28, 28), value, np.uint16)))
    assert colour(content) == [round(value / 257)] * 3


def test_float_and_32_bit_pixels() -> None:
    share = encoded(Image.fromarray(np.full((28, 28), 0.4, np.float32)), "TIFF")
    levels = encoded(Image.fromarray(np.full((28, 28), 102.0, np.float32)), "TIFF")
    assert colour(share) == colour(levels) == [102] * 3
    ramp = np.linspace(-1e6, 1e6, 28 * 28).reshape(28, 28)
    ramp[3, 3] = np.nan
    frames = load_image(encoded(Image.fromarray(ramp.astype(np.float32)), "TIFF"), LIMITS)
    assert (frames[0, 0, 0, 0], frames[0, -1, -1, 0], frames[0, 3, 3, 0]) == (0, 255, 128)
    whole = encoded(Image.fromarray(np.full((28, 28), 25700, np.int32)), "TIFF")
    assert colour(whole) == [100] * 3


@pytest.mark.parametrize(("mode", "value"), [("RGBA", (0, 0, 0, 0)), ("LA", (0, 0))])
def test_transparent_is_white(mode: str, value: tuple[int, ...]) -> None:
    assert colour(encoded(plain(colour=value, mode=mode))) == [255] * 3


def test_half_transparent_red_is_pink() -> None:
    assert colour(encoded(plain(colour=(255, 0, 0, 128), mode="RGBA"))) == [255, 127, 127]


def test_palette_with_and_without_transparency() -> None:
    image = plain(colour=GREEN).convert("P", palette=Image.Palette.ADAPTIVE)
    assert colour(encoded(image)) == list(GREEN)
    assert colour(encoded(image, transparency=image.getpixel((0, 0)))) == [255] * 3
    assert colour(encoded(plain(colour=BLUE), transparency=BLUE)) == [255] * 3


@pytest.mark.parametrize(("mode", "value"), [("1", 1), ("L", 255)])
def test_grey_and_black_and_white(mode: str, value: int) -> None:
    assert colour(encoded(plain(colour=value, mode=mode))) == [255] * 3


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_pixels_and_header_alike(kind: str, orientation: int) -> None:
    content = with_orientation(quarters(), orientation, kind)
    # First row and first column of the stored image, as TIFF 6.0 says where they are to be seen.
    corners = {
        1: (RED, GREEN, BLUE, WHITE),
        2: (GREEN, RED, WHITE, BLUE),
        3: (WHITE, BLUE, GREEN, RED),
        4: (BLUE, WHITE, RED, GREEN),
        5: (RED, BLUE, GREEN, WHITE),
        6: (BLUE, RED, WHITE, GREEN),
        7: (WHITE, GREEN, BLUE, RED),
        8: (GREEN, WHITE, RED, BLUE),
    }[orientation]
    frame = load_image(content, LIMITS)[0]
    height, width = (20, 40) if orientation < 5 else (40, 20)
    assert frame.shape == (height, width, 3)
    seen = [frame[y, x].astype(int) for y in (5, height - 5) for x in (5, width - 5)]
    assert all(abs(a - np.array(b)).max() < 60 for a, b in zip(seen, corners, strict=True))
    header = read_header(content, LIMITS)
    assert (header.frames, header.height, header.width) == (1, height, width)
    assert header.orientation == orientation


def test_damaged_exif_leaves_the_pixels() -> None:
    assert colour(encoded(plain(), "PNG", exif=b"Exif\0\0nonsense")) == list(RED)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_gives_evenly_spaced_frames(kind: str) -> None:
    greys = [(i * 40, i * 40, i * 40) for i in range(7)]
    content = animation(greys, kind)
    frames = load_image(content, LIMITS)
    assert frames.shape == (4, 28, 28, 3)
    assert np.abs(frames[:, 14, 14, 0].astype(int) - [0, 80, 160, 240]).max() <= 2
    assert read_header(content, LIMITS).frames == 4
    assert load_image(animation(greys[:2], kind), LIMITS).shape[0] == 2
    assert [spaced(total, 4) for total in (4, 9)] == [[0, 1, 2, 3], [0, 3, 5, 8]]


def test_further_pages_are_no_frames() -> None:
    pages = [plain(), plain(colour=BLUE)]
    assert colour(encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])) == list(RED)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    jpeg, png = encoded(noise(64, 64), "JPEG"), encoded(noise(64, 64))
    gif = animation([RED, GREEN, BLUE])
    assert reason(b"") == "empty"
    assert reason(jpeg[: len(jpeg) // 2]) == "truncated"
    assert reason(png[: len(png) // 2]) == "truncated"
    assert reason(gif[: len(gif) - 20]) in ("truncated", "corrupt")
    assert reason(png[:1000] + b"\xff" * 200 + png[1200:]) in ("corrupt", "truncated")
    assert reason(b"%PDF-1.7 not an image") == "unknown format"
    assert reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n") == "unknown format"
    assert reason(jpeg[:10]) in ("unknown format", "corrupt", "truncated")
    assert reason(tmp_path / "none.png") == "missing"
    assert reason(tmp_path) == "not a file"
    assert reason(Path("a\0b")) == "unreadable"
    os.mkfifo(tmp_path / "pipe.png")
    assert reason(tmp_path / "pipe.png") == "not a file"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_no_damage_raises_anything_else(kind: str) -> None:
    content = encoded(noise(40, 24), kind)
    random = np.random.RandomState(3)
    for _ in range(60):
        damaged = bytearray(content[: random.randint(1, len(content) + 1)])
        for place in random.randint(0, len(damaged), 4):
            damaged[place] = random.randint(256)
        for read in (load_image, read_header):
            try:
                read(bytes(damaged), ImageLimits(max_pixels=1_000_000))
            except ImageError as error:
                assert error.reason in ("truncated", "corrupt", "unknown format", "huge", "empty")


def test_huge_images_are_refused_by_their_header(tmp_path: Path) -> None:
    assert reason(png_header(30_000, 30_000)) == "huge"
    assert reason(png_header(11_000, 11_000)) == "huge"  # Pillow would only warn
    assert reason(png_header(0, 10)) in ("empty", "corrupt", "unknown format")
    with pytest.raises(ImageError, match="huge"):
        read_header(png_header(11_000, 11_000), LIMITS)
    small = ImageLimits(max_pixels=28 * 28, max_bytes=10_000)
    assert load_image(animation([RED] * 2 + [BLUE] * 6), small).shape[0] <= 4
    assert reason(animation([(i, i, i) for i in range(0, 90, 10)]), small) == "huge"
    (tmp_path / "long.bmp").write_bytes(encoded(plain(80, 80), "BMP"))
    assert reason(tmp_path / "long.bmp", small) == "huge"


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (28, 28, (2, 2)),
        (8, 8, (2, 2)),
        (1, 1, (2, 2)),
        (1, 5000, (2, 256)),
        (5000, 1, (256, 2)),
        (480, 640, (34, 46)),
        (3584, 3584, (256, 256)),
        (10_000, 5_000, (256, 128)),
    ],
)
def test_size_in_patches(height: int, width: int, expected: tuple[int, int]) -> None:
    assert fit(1, height, width, LIMITS) == expected


@given(
    st.integers(1, 4), st.integers(1, 9000), st.integers(1, 9000), st.integers(16, 5000), st.integers(1, 900)
)
def test_size_keeps_every_limit(frames: int, height: int, width: int, patches: int, tokens: int) -> None:
    limits = ImageLimits(max_patches=patches, max_tokens=tokens, max_side=1400)
    h, w = fit(frames, height, width, limits)
    assert h % 2 == w % 2 == 0 and min(h, w) >= 2
    assert frames * h * w <= patches and h * w // 4 <= tokens and max(h, w) * 14 <= 1400
    # Smaller than asked only where a limit says so; larger by less than one cell.
    assert h * 14 < height + 28 and w * 14 < width + 28


def test_patches_are_channel_row_column_in_reading_order() -> None:
    frames = np.arange(2 * 28 * 56 * 3, dtype=np.uint32).reshape(2, 28, 56, 3).astype(np.uint8)
    patches, grid = to_patches(frames, LIMITS)
    assert grid == (2, 2, 4) and patches.shape == (16, 588) and patches.dtype == np.float32
    for t, i, j in ((0, 0, 0), (1, 0, 3), (1, 1, 2)):
        cut = frames[t, 14 * i : 14 * i + 14, 14 * j : 14 * j + 14].transpose(2, 0, 1)
        expected = (cut.reshape(-1) / 255 - 0.5) / 0.5
        assert np.allclose(patches[(t * 2 + i) * 4 + j], expected, atol=1e-6)


def test_resizing_keeps_what_is_where() -> None:
    patches, (_, h, w) = to_patches(load_image(encoded(quarters(400, 200)), LIMITS), LIMITS)
    colours = patches.reshape(h, w, 3, 196).mean(-1)
    assert (h, w) == (14, 28)
    assert np.allclose(colours[2, 3], [1, -1, -1]) and np.allclose(colours[2, 25], [-1, 1, -1])
    assert np.allclose(colours[11, 3], [-1, -1, 1]) and np.allclose(colours[11, 25], [1, 1, 1])


def test_skips_count_each_once_and_warn_once_for_a_reason() -> None:
    lines: list[str] = []
    skips = Skips(lines.append)
    for name in ("a", "b", "a"):
        skips.add("truncated", name)
    skips.add("huge", "c")
    assert skips.counts == {"truncated": 2, "huge": 1} and skips.total == 3
    assert len(lines) == 2 and "a is left out (truncated)" in lines[0]
    assert skips.summary() == "left out 3: 2 truncated (first a), 1 huge (first c)"
    assert Skips(print).summary() == ""

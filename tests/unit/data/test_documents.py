"""Records to documents and pieces, boxes in both coordinates, what a bad image takes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from k3train.data.documents import Document, Picture, Region, parse_record, region_text, upright
from k3train.data.encode import Encoder
from k3train.data.folder import ImageFolder
from k3train.data.images import ImageLimits, load_image, read_header
from k3train.data.skips import Skips
from k3train.data.tokenizer import ByteTokenizer
from k3train.errors import UserError
from tests.unit.data.pictures import BLUE, RED, animation, encoded, plain, with_orientation

IMAGE, EOD = ByteTokenizer.image_id, ByteTokenizer.eod_id


def encoder(**limits: int) -> Encoder:
    return Encoder(ByteTokenizer(), ImageLimits(**limits), Skips(lambda _: None))


def folder(path: Path, records: list[Any], **files: bytes) -> ImageFolder:
    for name, content in files.items():
        (path / name.replace("_", ".")).write_bytes(content)
    (path / "index.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return ImageFolder(path)


def ids(source: ImageFolder, index: int, reader: Encoder) -> list[int]:
    return [int(i) for piece in reader.pieces(source.read(index)) for i in piece.ids]


def test_caption_and_interleaved_records(tmp_path: Path) -> None:
    source = folder(
        tmp_path,
        [
            {"image": "a.png", "text": "red"},
            {"parts": [{"text": "x"}, {"image": "a.png"}, {"text": "y"}, {"video": "v.gif"}]},
            {"parts": [{"video": ["a.png", "b.png", "a.png"]}, {"text": "z"}]},
            {"text": "no image"},
        ],
        a_png=encoded(plain(56, 28)),
        b_png=encoded(plain(28, 28, BLUE)),
        v_gif=animation([RED, BLUE]),
    )
    reader = encoder()
    assert len(source) == 4
    assert ids(source, 0, reader) == [IMAGE, IMAGE, *b"red", EOD]
    assert ids(source, 1, reader) == [*b"x", IMAGE, IMAGE, *b"y", IMAGE, EOD]
    assert ids(source, 2, reader) == [IMAGE, IMAGE, *b"z", EOD]
    assert ids(source, 3, reader) == [*b"no image", EOD]
    grids = [piece.grid for i in (1, 2) for piece in reader.pieces(source.read(i)) if piece.grid]
    assert grids == [(1, 2, 4), (2, 2, 2), (3, 2, 4)]
    picture = source.read(2).parts[0]
    assert isinstance(picture, Picture)
    patches = reader.patches(picture, (3, 2, 4))
    assert patches is not None and patches.shape == (24, 588)
    assert np.allclose(patches.reshape(3, 8, 3, 196).mean((1, 3)), [[1, -1, -1], [-1, -1, 1], [1, -1, -1]])
    assert reader.skips.total == 0


def test_the_name_of_the_placeholder_is_plain_text(tmp_path: Path) -> None:
    source = folder(tmp_path, [{"text": "<image> half \ud800"}])
    assert ids(source, 0, encoder()) == [*b"<image> half ?", EOD]


def test_a_bad_image_takes_its_boxes_and_a_caption_with_it(tmp_path: Path) -> None:
    bad = {"image": "bad.png", "boxes": [{"label": "cat", "box": [0, 0, 9, 9]}]}
    source = folder(
        tmp_path,
        [
            bad | {"text": "caption"},
            {"parts": [{"text": "kept"}, bad, {"image": "../a.png"}, {"image": "none.png"}]},
            {"parts": [bad]},
            {"parts": [{"video": ["a.png", "bad.png"]}, {"image": "a.png"}]},
        ],
        bad_png=b"not a picture",
        a_png=encoded(plain()),
    )
    reader = encoder()
    assert ids(source, 0, reader) == []
    assert ids(source, 1, reader) == [*b"kept", EOD]
    assert ids(source, 2, reader) == []
    assert ids(source, 3, reader) == [IMAGE, EOD]
    assert reader.skips.counts == {
        "unknown format": 4,
        "outside the folder": 1,
        "missing": 1,
        "empty document": 1,
    }


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("normalised", [False, True])
def test_stored_boxes_turn_with_the_pixels(orientation: int, normalised: bool) -> None:
    image = plain(100, 60, "black")
    image.paste((255, 255, 255), (10, 20, 40, 50))
    content = with_orientation(image, orientation)
    header = read_header(content, ImageLimits())
    box = (0.1, 20 / 60, 0.4, 50 / 60) if normalised else (10.0, 20.0, 40.0, 50.0)
    frame = load_image(content, ImageLimits())[0, :, :, 0]
    rows, columns = np.nonzero(frame)
    text = region_text(Region("it", box, normalised, stored=True), header, header.height, header.width)
    left, top, right, bottom = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    assert text is not None and text.startswith(f"it [{left}, {top}, {right}, {bottom}] [")
    # A box of the upright image is the white rectangle as it is seen, and means the same.
    seen = Region("it", (float(left), float(top), float(right), float(bottom)))
    assert region_text(seen, header, header.height, header.width) == text


def test_boxes_follow_the_resized_image(tmp_path: Path) -> None:
    boxes = [
        {"label": "a", "box": [0, 50, 100, 100]},
        {"label": "b", "box_normalised": [0.5, 0.25, 1.5, 0.5]},
        {"label": "off", "box": [300, 0, 400, 10]},
        {"label": "nan", "box": [float("nan"), 0, 4, 10]},
        {"label": "vast", "box": [0, 0, 10**401, 10]},
        {"label": "vast", "box_normalised": [-(10**401), 0, 1, 1]},
        {"label": "swapped", "box": [100, 100, 0, 50]},
    ]
    source = folder(
        tmp_path, [{"image": "a.png", "text": "t", "boxes": boxes}], a_png=encoded(plain(200, 100))
    )
    reader = encoder(max_side=112)
    pieces = reader.pieces(source.read(0))
    assert pieces[0].grid == (1, 4, 8)  # 112 x 56 px
    text = bytes(i for piece in pieces[1:] for i in piece.ids.tolist() if i < 256).decode()
    assert text == (
        "a [0, 28, 56, 56] [0.000, 0.500, 0.500, 1.000]\n"
        "b [56, 14, 112, 28] [0.500, 0.250, 1.000, 0.500]\n"
        "swapped [0, 28, 56, 56] [0.000, 0.500, 0.500, 1.000]\n"
        "t"
    )
    assert reader.skips.counts == {"box outside its image": 4}


def test_upright_is_the_default_frame() -> None:
    content = with_orientation(plain(100, 50), 6)
    header = read_header(content, ImageLimits())
    assert (header.height, header.width) == (100, 50)
    assert upright(Region("", (0, 0, 25, 10)), header) == (0, 0, 0.5, 0.1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "expected an object"),
        ({"parts": {}}, "`parts` must be a list"),
        ({}, r"found \[\]"),
        ({"parts": [{"sound": "a.wav"}]}, "must hold `text`, `image` or `video`"),
        ({"caption": "x"}, r"found \['caption'\]"),
        ({"image": "a.png", "text": 3}, "`text` must be a string"),
        ({"image": 7}, "must be a file name"),
        ({"image": ["a.png", "b.png"]}, "`image` is one file"),
        ({"image": []}, "`image` is one file"),
        ({"video": {}}, "must be a file name"),
        ({"video": [], "boxes": 1}, "`boxes` must be a list"),
        ({"image": "a.png", "boxes": {"x": 1}}, "`boxes` must be a list"),
        ({"image": "a.png", "boxes": [{"box": [1, 2, 3]}]}, "four numbers"),
        ({"image": "a.png", "boxes_in": "rotated"}, "valid: upright, stored"),
    ],
)
def test_records_that_make_no_sense(record: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_record(record, "index.jsonl line 3", lambda name: Path(name))
    assert "index.jsonl line 3" in str(caught.value)


def test_records_of_nothing_are_empty_documents(tmp_path: Path) -> None:
    empty = [
        {"text": ""},
        {"parts": []},
        {"video": []},
        {"video": [], "text": "x"},
        {"parts": [{"video": []}]},
    ]
    source = folder(tmp_path, [*empty, {"parts": [{"video": []}, {"text": "kept"}]}])
    reader = encoder()
    assert [ids(source, index, reader) for index in range(5)] == [[]] * 5
    assert reader.skips.counts == {"empty document": 5}
    assert ids(source, 5, reader) == [*b"kept", EOD]


def test_names_that_are_no_unicode_can_be_printed(tmp_path: Path) -> None:
    source = folder(tmp_path, [{"image": "\ud800.png"}])
    said: list[str] = []
    reader = Encoder(ByteTokenizer(), ImageLimits(), Skips(said.append))
    assert reader.pieces(source.read(0)) == []
    assert reader.skips.counts == {"unreadable": 1}
    for line in (*said, reader.skips.summary()):
        assert "\\ud800.png" in line and line.encode().decode() == line


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        ImageFolder(tmp_path)
    (tmp_path / "index.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="has no lines"):
        ImageFolder(tmp_path)
    (tmp_path / "index.jsonl").write_text('\n{"text": "a"}\n\n{"text": \n')
    source = ImageFolder(tmp_path / "index.jsonl")
    assert len(source) == 2 and source.read(0) == Document(f"{source.index} line 2", ("a",))
    with pytest.raises(UserError, match="line 4 is not valid JSON"):
        source.read(1)


def test_patches_that_fail_late_are_counted(tmp_path: Path) -> None:
    content = encoded(Image.fromarray(np.random.RandomState(0).randint(0, 256, (56, 56, 3), np.uint8)))
    source = folder(tmp_path, [{"image": "a.png"}], a_png=content[: len(content) // 2])
    reader = encoder()
    pieces = reader.pieces(source.read(0))
    picture = source.read(0).parts[0]
    assert pieces[0].grid == (1, 4, 4) and isinstance(picture, Picture)
    assert reader.patches(picture, (1, 4, 4)) is None
    (tmp_path / "a.png").write_bytes(encoded(plain()))
    assert reader.patches(picture, (1, 4, 4)) is None
    assert reader.skips.counts == {"truncated": 1, "changed since it was measured": 1}

"""Tar shards: what a sample's members make, and shards that energon itself has prepared."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3train.data.documents import Document, Picture
from k3train.data.encode import Encoder
from k3train.data.images import ImageLimits
from k3train.data.measure import measure
from k3train.data.multimodal import ImageWindows, open_source
from k3train.data.skips import ImageError, Skips
from k3train.data.tokenizer import ByteTokenizer
from k3train.data.webdataset import TarShards, sample_document
from k3train.errors import UserError
from tests.unit.data.pictures import encoded, noise

PNG = encoded(noise(28, 28))


def test_members_without_a_record_are_a_caption() -> None:
    document = sample_document({"2.jpg": b"b", "1.jpg": b"a", "txt": "nä".encode(), "cls": b"3"}, "s/7")
    assert document.caption and document.parts[2] == "nä"
    assert [part.blobs for part in document.parts if isinstance(part, Picture)] == [(b"a",), (b"b",)]
    assert sample_document({"txt": b"alone"}, "s/8") == Document("s/8", ("alone",))


def test_a_record_names_the_other_members() -> None:
    record = {"parts": [{"text": "x"}, {"image": "png"}, {"video": ["0.png", ".1.png"]}, {"image": "gif"}]}
    members = {"json": json.dumps(record).encode(), "png": b"a", "0.png": b"b", "1.png": b"c"}
    document = sample_document(members, "s/7")
    blobs = [part.blobs for part in document.parts if isinstance(part, Picture)]
    assert document.parts[0] == "x" and blobs[:2] == [(b"a",), (b"b", b"c")]
    assert isinstance(blobs[2][0], ImageError) and blobs[2][0].reason == "missing"
    boxes = json.dumps({"boxes": [{"label": "cat", "box": [0, 0, 9, 9]}]}).encode()
    captioned = sample_document({"json": boxes, "jpg": b"a", "txt": b"words"}, "s/8")
    picture = captioned.parts[0]
    assert isinstance(picture, Picture) and captioned.caption and captioned.parts[1] == "words"
    assert picture.regions[0].label == "cat"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"json": b"{"}, "not valid JSON"),
        ({"json": b"[1]"}, "must hold an object"),
        ({"npy": b"1"}, r"holds \['npy'\]"),
        ({"png": PNG, "txt": b"\xff"}, "not UTF-8"),
    ],
)
def test_samples_that_make_no_sense(members: dict[str, bytes], message: str) -> None:
    with pytest.raises(UserError, match=f"s/7.*{message}"):
        sample_document(members, "s/7")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    energon = pytest.importorskip("megatron.energon")
    path = tmp_path_factory.mktemp("shards")
    for shard in range(3):
        with tarfile.open(path / f"shard_{shard}.tar", "w") as tar:
            for number in range(4):
                key = f"{shard}{number}"
                for ending, content in (("png", encoded(noise(28, 28, number))), ("txt", key.encode())):
                    info = tarfile.TarInfo(f"{key}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    energon.BaseWebdatasetFactory.prepare_dataset(
        path,
        [f"shard_{shard}.tar" for shard in range(3)],
        split_parts_patterns=[("train", "shard_[01].tar"), ("val", "shard_2.tar")],
        workers=1,
    )
    yield path


def captions(source: TarShards) -> list[str]:
    return [str(source.read(index).parts[1]) for index in range(len(source))]


def test_prepared_shards_by_number(prepared: Path) -> None:
    train, valid = open_source(str(prepared), "train"), open_source(str(prepared), "valid")
    assert isinstance(train, TarShards) and isinstance(valid, TarShards)
    assert captions(train) == ["00", "01", "02", "03", "10", "11", "12", "13"]
    assert captions(valid) == ["20", "21", "22", "23"]
    assert train.read(6).parts[1] == "12" and train.fingerprint != valid.fingerprint
    picture = train.read(1).parts[0]
    assert isinstance(picture, Picture) and picture.blobs == (encoded(noise(28, 28, 1)),)


def test_samples_of_shards_resume_by_index(prepared: Path, tmp_path: Path) -> None:
    def windows() -> ImageWindows:
        source = open_source(str(prepared), "train")
        encoder = Encoder(ByteTokenizer(), ImageLimits(), Skips(print))
        measures = measure(source, encoder, str(tmp_path))
        return ImageWindows(source, encoder, measures, sequence_length=16, max_patches=64, seed=3)

    straight = windows()
    forward = [straight[index] for index in range(9)]
    assert all((windows()[i]["tokens"] == forward[i]["tokens"]).all() for i in (8, 2))
    assert straight.windows == 2  # eight documents of four tokens


def test_a_torn_shard_is_counted(prepared: Path, tmp_path: Path) -> None:
    source = TarShards(prepared, "valid")
    shard = prepared / "shard_2.tar"
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[: len(content) // 2 - 700])
        torn = TarShards(prepared, "valid")
        skips = Skips(lambda _: None)
        measures = measure(torn, Encoder(ByteTokenizer(), ImageLimits(), skips), str(tmp_path))
        assert len(measures[0]) == 3 and measures[3] == []
        assert skips.counts["damaged shard"] >= 1
    finally:
        shard.write_bytes(content)
    assert captions(source) == ["20", "21", "22", "23"]


def test_folders_that_energon_did_not_prepare(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / ".nv-meta").mkdir()
    with pytest.raises(UserError, match="no dataset that `energon prepare` made with a split 'train'"):
        open_source(str(tmp_path), "train")

"""A checkpoint against its manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3train.checkpoint import manifest
from k3train.checkpoint.verify import verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files and their manifest."""
    for index in range(3):
        (tmp_path / f"file-{index}").write_bytes(bytes([index]) * 100)
    manifest.write(tmp_path, {"step": 5}, {})
    return tmp_path


def test_manifest_holds_sizes_and_sha256_and_what_it_was_given(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    assert content["step"] == 5
    # sha256 of one hundred zero bytes, computed with coreutils.
    digest = "cd00e292c5970d3c5e2f0ffa5171e555bc46bfc4faddfb4a418b6840b86e79a3"
    assert content["files"]["file-0"] == [100, digest]
    assert sorted(content["files"]) == ["file-0", "file-1", "file-2"]


def test_intact(folder: Path) -> None:
    assert verify(folder) == []


def test_every_kind_of_damage_is_named(folder: Path) -> None:
    (folder / "file-0").write_bytes(b"short")
    (folder / "file-1").write_bytes(b"\x01" * 99 + b"\x00")
    (folder / "file-2").unlink()
    assert verify(folder) == [
        "file-0 has 5 bytes and should have 100",
        "the content of file-1 does not match its checksum",
        "file-2 is missing",
    ]


def test_parts_cover_every_file_once(folder: Path) -> None:
    for index in range(3):
        (folder / f"file-{index}").unlink()
    shares = [verify(folder, part=part, parts=2) for part in range(2)]
    assert shares == [["file-0 is missing", "file-2 is missing"], ["file-1 is missing"]]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_torn_manifest(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text)
    assert verify(folder) == ["manifest.json is missing or torn"]


def test_missing_manifest(tmp_path: Path) -> None:
    assert verify(tmp_path) == ["manifest.json is missing or torn"]

"""Documents of WebDataset tar shards, read through megatron-energon, which `energon prepare` has indexed.

Energon's own loaders hand out a stream, whose place is a state of every worker. Its indexed tar reader below
them gives any sample by number, so that a run resumes by the number alone, in any layout; order, mixing and
packing are those of the other sources.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

from ..errors import UserError
from .documents import Document, Picture, parse_record
from .images import Blob
from .skips import ImageError

META_FOLDER = ".nv-meta"
PARTS = {"train": "train", "valid": "val"}
IMAGE_ENDINGS = ("jpg", "jpeg", "png", "gif", "webp", "bmp", "tif", "tiff", "ppm")
TEXT_ENDINGS = ("txt", "caption")


class TarShards:
    """Samples of one split (energon's `train` or `val`) of a prepared dataset.

    A sample with a `json` member is a record (see `documents.py`) that names the other members by their
    endings, such as `jpg` or `1.png`. One without is its images and then its text, a caption.

    Raises:
        UserError: megatron-energon is not installed, or the folder is not prepared or lacks the split.
    """

    def __init__(self, path: Path, split: str) -> None:
        self.name = str(path)
        self._reader = _open_reader(path, PARTS[split])
        shards = [(str(shard.path), shard.count) for shard in self._reader.shard_infos]
        identity = json.dumps([split, [(*shard, _size(shard[0])) for shard in shards]])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, index: int) -> Document:
        """Sample `index` in the order of the shards. Raises ImageError where the shard is damaged."""
        try:
            sample = self._reader[index]
        except (OSError, ValueError, tarfile.TarError, AttributeError) as error:
            raise ImageError("damaged shard") from error
        if sample is None:
            raise ImageError("excluded by the split")
        members = {key: value for key, value in sample.items() if not key.startswith("__")}
        return sample_document(members, f"{self.name} {sample['__shard__']}/{sample['__key__']}")


def sample_document(members: dict[str, Any], name: str) -> Document:
    """The document of one sample, given as ending -> bytes.

    Raises:
        UserError: its `json` member is no record, or there is nothing in it.
    """

    def resolve(ending: str) -> Blob:
        return members.get(ending.removeprefix("."), ImageError("missing"))

    images = sorted(ending for ending in members if ending.lower().rsplit(".", 1)[-1] in IMAGE_ENDINGS)
    text = next((_text(members[ending], name) for ending in TEXT_ENDINGS if ending in members), "")
    if "json" in members:
        record = _record(members["json"], name)
        if len(images) == 1 and not {"parts", "image", "video"} & record.keys():
            record = {"image": images[0], **record}
        if text and not {"parts", "text"} & record.keys():
            record = {"text": text, **record}
        return parse_record(record, name, resolve)
    if not images and not text:
        raise UserError(f"{name} holds {sorted(members)}; expected images, txt or json")
    pictures = tuple(Picture(f"{name}.{ending}", (members[ending],)) for ending in images)
    return Document(name, (*pictures, text) if text else pictures, caption=bool(images))


def _open_reader(path: Path, part: str) -> Any:
    try:
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
        from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta
    except ImportError as error:
        raise UserError(
            f"{path} holds tar shards; install megatron-energon to read them ({error})"
        ) from error
    root = EPath(str(path.resolve()))
    try:
        meta = WebdatasetMeta.from_config(root, split_part=part)
    except Exception as error:  # energon raises its own errors, assertions and what YAML and files raise
        raise UserError(
            f"{path} is no dataset that `energon prepare` made with a split {part!r}: {error}"
        ) from error
    excluded = meta.sample_excludes
    return ShardInfosITarReader(root, meta.shards, sample_filter=lambda key: key not in excluded)


def _size(path: str) -> int | None:
    file = Path(path)
    return file.stat().st_size if file.is_file() else None


def _record(content: bytes, name: str) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}.json is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{name}.json must hold an object, not {record!r:.60}")
    return record


def _text(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: its text is not UTF-8 (byte {error.start})") from error

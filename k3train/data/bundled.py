"""The default corpus: the Python sources of the running interpreter's standard library.

Real text that every machine has, so that a first run downloads nothing. A file is one document; the hash of
its relative path puts it into training or validation, on every machine alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..errors import UserError
from .cache import cache_folder, file_lock
from .indexed import open_corpus, token_dtype, write_index
from .prepare import PreparedInfo
from .tokenizer import Tokenizer

VALID_SHARE = 0.05
# Installed packages and test suites differ between machines; so do files that record how Python was built.
LEFT_OUT_FOLDERS = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"))
LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
# Changes when the same sources would give another corpus.
FORMAT = 1


def bundled_corpus(
    tokenizer: Tokenizer, cache_dir: str | None = None, max_bytes: int | None = None
) -> tuple[str, str]:
    """Prefixes of the training and the validation corpus, built once and kept in the cache folder.

    Any number of processes may call this at once: one builds, the others wait. With `max_bytes`, the first
    files in the order of their hash are taken, up to that many bytes of text over both splits.

    Raises:
        UserError: there are no sources (a zipped library), or the cache folder cannot be written.
    """
    if max_bytes is not None and max_bytes < 1000:
        raise UserError(f"data.max_bytes={max_bytes}; valid: 1000 or more")
    root = Path(sysconfig.get_path("stdlib"))
    files = _source_files(root)
    if not files:
        raise UserError(f"{root} holds no Python sources; set data.source=indexed and data.train")
    key = _cache_key(root, files, tokenizer, max_bytes)
    parent = cache_folder(cache_dir) / "bundled"
    target = parent / key
    prefixes = str(target / "train"), str(target / "valid")
    if not _is_whole(target):
        try:
            parent.mkdir(exist_ok=True)
            with file_lock(parent / f"{key}.lock"):
                if not _is_whole(target):
                    _build(root, files, tokenizer, max_bytes, target)
        except OSError as error:
            raise UserError(f"{parent} cannot be written ({error.strerror}); set data.cache_dir") from error
    return prefixes


def is_validation(relative_path: str) -> bool:
    """Whether this file (with forward slashes) belongs to the validation split."""
    return _hash(relative_path) < VALID_SHARE


def _hash(relative_path: str) -> float:
    # The prefix is chosen so that the validation share is near 5 % of the bytes too, not of the files only.
    digest = hashlib.sha256(f"k3train/{relative_path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _source_files(root: Path) -> list[str]:
    """Relative paths in the order of their hash, which is the same wherever the file exists."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT_FOLDERS]
        relative = Path(folder).relative_to(root)
        names += [
            (relative / name).as_posix()
            for name in files
            if name.endswith(".py") and not name.startswith(LEFT_OUT_FILES)
        ]
    return sorted(names, key=lambda name: (_hash(name), name))


def _cache_key(root: Path, files: list[str], tokenizer: Tokenizer, max_bytes: int | None) -> str:
    sizes = [(name, (root / name).stat().st_size) for name in files]
    settings = json.dumps([FORMAT, tokenizer.fingerprint, max_bytes, sizes])
    version = f"python{platform.python_version()}"
    return f"{version}-{tokenizer.fingerprint}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"


def _is_whole(target: Path) -> bool:
    try:
        return all(open_corpus(str(target / split)).num_tokens > 0 for split in ("train", "valid"))
    except UserError:
        return False


def _build(root: Path, files: list[str], tokenizer: Tokenizer, max_bytes: int | None, target: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        for split, wanted, share in (("train", False, 1 - VALID_SHARE), ("valid", True, VALID_SHARE)):
            chosen = [name for name in files if is_validation(name) == wanted]
            limit = None if max_bytes is None else int(max_bytes * share)
            _write_split(temporary / split, _texts(root, chosen, limit), tokenizer, target.name)
        if target.exists():
            shutil.rmtree(target)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _texts(root: Path, names: list[str], limit: int | None) -> Iterator[str]:
    left = limit
    for name in names:
        try:
            content = (root / name).read_bytes()
            content.decode()
        except (UnicodeDecodeError, OSError):
            continue
        if left is not None:
            content = content[:left]
            left -= len(content)
        # A cut may fall inside a character.
        text = content.decode(errors="ignore")
        if text:
            yield text
        if left == 0:
            return


def _write_split(stem: Path, texts: Iterator[str], tokenizer: Tokenizer, recipe: str) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[int] = []
    num_bytes = 0
    with stem.with_suffix(".bin").open("wb") as output:
        for text in texts:
            tokens = tokenizer.encode_array(text, dtype)
            output.write(tokens.tobytes() + dtype(tokenizer.eod_id).tobytes())
            lengths.append(tokens.size + 1)
            num_bytes += len(text.encode())
    write_index(stem.with_suffix(".idx"), np.array(lengths, np.int32), dtype)
    info = PreparedInfo(
        prefix=stem.name,
        tokenizer=tokenizer.fingerprint,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        documents=len(lengths),
        tokens=sum(lengths),
        bytes=num_bytes,
        empty=0,
        dtype=np.dtype(dtype).name,
        recipe=recipe,
    )
    stem.with_suffix(".json").write_text(json.dumps(asdict(info), indent=1) + "\n", encoding="utf-8")

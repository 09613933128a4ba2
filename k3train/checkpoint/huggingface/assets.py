"""The files of a Hugging Face folder beside its weights: tokenizer, generation settings, templates, code."""

from __future__ import annotations

import shutil
from pathlib import Path

from .config import FILE
from .reader import SUFFIX
from .writer import CHECKSUMS

FOLDER = "huggingface"
"""Where an imported run keeps them, `config.json` included."""
WEIGHTS = (SUFFIX, f"{SUFFIX}.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
TOKENIZERS = ("tokenizer.json", "tiktoken.model")


def assets(folder: Path) -> list[Path]:
    """All files that are carried over as they are; `config.json` is not one of them."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(WEIGHTS)
        and path.name not in (FILE, CHECKSUMS)
    ]


def copy_assets(source: Path, target: Path, *, config: bool = False) -> list[str]:
    """Copy them, and `config.json` too if asked for; their names."""
    target.mkdir(parents=True, exist_ok=True)
    copied = [*assets(source), *([source / FILE] if config else [])]
    for path in copied:
        shutil.copyfile(path, target / path.name)
    return [path.name for path in copied]


def carry(source: Path, run: Path) -> None:
    """Let a run hold the files that came with the weights it starts from, for its own export."""
    beside = source if (source / FILE).is_file() else source / FOLDER
    if beside.is_dir():
        copy_assets(beside, run / FOLDER, config=True)


def tokenizer(folder: Path) -> Path | None:
    """The tokenizer file that our loader reads, if the folder has one."""
    return next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)

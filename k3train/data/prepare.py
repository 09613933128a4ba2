"""Text files to a Megatron `.bin/.idx` pair, one document after another, each closed by an end token.

The inputs are cut into shards that do not depend on the number of workers. Each shard becomes one part
in `<prefix>.parts`, complete once its `.json` stands; a run that was killed continues with the parts it
finds. The parts are joined in order and renamed into place, so that a file under its final name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .cache import file_lock
from .indexed import open_corpus, token_dtype, write_index
from .sources import Piece, cut, find_inputs, read_documents
from .tokenizer import Tokenizer, load_tokenizer
from .workers import Progress, run_shards

SHARD_BYTES = 64 << 20
# Changes when the same inputs would give other files.
FORMAT = 1


@dataclass(frozen=True)
class PreparedInfo:
    """What a prepared corpus holds; also its `<prefix>.json`."""

    prefix: str
    tokenizer: str
    fingerprint: str
    vocab_size: int
    documents: int
    tokens: int
    bytes: int
    """UTF-8 bytes of text."""
    empty: int
    """Documents without text, which are left out."""
    dtype: str
    recipe: str
    """SHA-256 of the inputs (path, size, time of change) and settings."""

    def __str__(self) -> str:
        left_out = f", {self.empty:,} empty ones left out" if self.empty else ""
        return (
            f"{self.prefix}.bin/.idx: {self.documents:,} documents{left_out}, {self.tokens:,} tokens "
            f"({self.dtype}) from {self.bytes / 1e6:,.1f} MB of text"
        )


@dataclass(frozen=True)
class Shard:
    """The unit of work and of resumption: neighbouring pieces, about SHARD_BYTES of input together."""

    number: int
    pieces: tuple[Piece, ...]
    size: int


@dataclass(frozen=True)
class Job:
    """What every worker needs besides its shard."""

    folder: str
    tokenizer: str
    text_key: str


def prepare(
    inputs: list[str],
    output_prefix: str,
    tokenizer: str,
    *,
    workers: int,
    text_key: str = "text",
    resume: bool = True,
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> PreparedInfo:
    """Tokenize `inputs` (files, folders, globs) into `<output_prefix>.bin`, `.idx` and `.json`.

    One document per JSON line, parquet row or .txt file, in the order of the inputs whatever `workers`.
    With `resume`, finished parts of a killed run with the same inputs and settings are kept, and a corpus
    made of other inputs is not replaced.

    Raises:
        UserError: an input is wrong (the message names file and line), the output cannot be written, or
            another process is writing it.
    """
    if workers < 1:
        raise UserError(f"workers={workers}; valid: 1 or more")
    if not Path(output_prefix).name or Path(output_prefix).is_dir():
        raise UserError(f"output prefix {output_prefix!r} is a folder; name files in it, as in data/train")
    output_prefix = str(Path(output_prefix).expanduser())
    encoder = load_tokenizer(tokenizer)
    try:
        files = find_inputs(inputs)
        recipe = recipe_of(files, encoder, text_key, shard_bytes)
        finished = already_made(output_prefix, recipe) if resume else None
        if finished is not None:
            return finished
        shards = _plan_shards(files, shard_bytes)
        with parts_folder(output_prefix, recipe, resume) as folder:
            job = Job(str(folder), tokenizer, text_key)
            todo = [shard for shard in shards if not part_is_whole(folder, shard.number)]
            run_shards(build_part, job, todo, workers, Progress(shards, todo, shown=progress))
            if recipe_of(files, encoder, text_key, shard_bytes) != recipe:
                raise UserError("an input changed while it was read; run again when it is complete")
            info = publish(folder, len(shards), output_prefix, tokenizer, encoder, recipe)
    except OSError as error:
        place = error.filename or output_prefix
        raise UserError(f"{place}: {error.strerror or error}; finished parts are kept, run again") from error
    return info


def build_part(job: Job, shard: Shard, progress: Any) -> None:
    """Write one shard's tokens and document lengths; its `.json`, written last, declares them whole.

    `progress(bytes, tokens)` is called with what was done since the last call; it raises to stop the work.
    """
    encoder = load_tokenizer(job.tokenizer)
    dtype = token_dtype(encoder.vocab_size)
    stem = Path(job.folder) / f"{shard.number:06d}"
    lengths: list[int] = []
    text_bytes = empty = 0
    with stem.with_suffix(".bin").open("wb") as output:
        for piece in shard.pieces:
            done = 0
            for text, position in read_documents(piece, job.text_key):
                if text:
                    tokens = encoder.encode_array(text, dtype)
                    output.write(tokens)
                    output.write(dtype(encoder.eod_id).tobytes())
                    lengths.append(tokens.size + 1)
                    text_bytes += len(text.encode())
                else:
                    empty += 1
                progress(position - done, lengths[-1] if text else 0)
                done = position
            progress(piece.size - done, 0)
        output.flush()
        os.fsync(output.fileno())
    np.array(lengths, np.int32).tofile(stem.with_suffix(".len"))
    counts = {"documents": len(lengths), "tokens": sum(lengths), "bytes": text_bytes, "empty": empty}
    write_json(stem.with_suffix(".json"), counts | {"itemsize": np.dtype(dtype).itemsize})


def _plan_shards(files: list[Path], shard_bytes: int) -> list[Shard]:
    shards: list[Shard] = []
    pieces: list[Piece] = []
    size = 0
    for piece in (piece for path in files for piece in cut(path, shard_bytes)):
        pieces.append(piece)
        size += piece.size
        if size >= shard_bytes:
            shards.append(Shard(len(shards), tuple(pieces), size))
            pieces, size = [], 0
    return [*shards, Shard(len(shards), tuple(pieces), size)] if pieces else shards


def recipe_of(files: list[Path], encoder: Tokenizer, text_key: str, shard_bytes: int = SHARD_BYTES) -> str:
    """What `PreparedInfo.recipe` says of a corpus of these files."""
    stats = [(str(path.resolve()), path.stat()) for path in files]
    inputs = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    settings = [FORMAT, encoder.fingerprint, text_key, shard_bytes, inputs]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def read_info(prefix: str) -> PreparedInfo | None:
    """The `.json` beside a corpus; None when there is none, as beside Megatron's own tools' files."""
    path = Path(f"{prefix}.json").expanduser()
    if not path.is_file():
        return None
    try:
        return PreparedInfo(**{**json.loads(path.read_text(encoding="utf-8")), "prefix": prefix})
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} does not describe a prepared corpus: {error}; prepare it again") from error


def already_made(prefix: str, recipe: str) -> PreparedInfo | None:
    """The whole corpus of this recipe, if it stands there. Raises UserError where another one does."""
    info = read_info(prefix)
    if info is None:
        taken = [name for name in (f"{prefix}.bin", f"{prefix}.idx") if Path(name).exists()]
        if len(taken) == 2:
            raise UserError(
                f"{taken[0]} exists, made elsewhere; choose another prefix, or --no-resume to replace it"
            )
        return None
    if info.recipe != recipe:
        raise UserError(
            f"{prefix}.json describes a corpus of other inputs or settings; "
            "choose another prefix, or --no-resume to replace it"
        )
    try:
        return info if open_corpus(prefix).num_tokens == info.tokens else None
    except UserError:
        return None


@contextmanager
def parts_folder(prefix: str, recipe: str, resume: bool) -> Iterator[Path]:
    """`<prefix>.parts`, locked, holding parts of `recipe` only; removed when the work is complete."""
    folder = Path(f"{prefix}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder / "lock", wait=False))
        except BlockingIOError:
            raise UserError(f"{folder} is in use: another call writes this prefix") from None
        manifest = folder / "manifest.json"
        kept = json.loads(manifest.read_text()) if manifest.is_file() else None
        if not resume or kept != {"recipe": recipe}:
            for path in folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            write_json(manifest, {"recipe": recipe})
        yield folder
        shutil.rmtree(folder)


def part_is_whole(folder: Path, number: int) -> bool:
    """Whether a part was written to its end."""
    stem = folder / f"{number:06d}"
    if not stem.with_suffix(".json").is_file():
        return False
    counts = json.loads(stem.with_suffix(".json").read_text())
    sizes = {".bin": counts["tokens"] * counts["itemsize"], ".len": counts["documents"] * 4}
    return all(
        stem.with_suffix(suffix).is_file() and stem.with_suffix(suffix).stat().st_size == size
        for suffix, size in sizes.items()
    )


def publish(
    folder: Path, parts: int, prefix: str, tokenizer: str, encoder: Tokenizer, recipe: str
) -> PreparedInfo:
    """Join the parts [0, parts) and rename the corpus into place."""
    stems = [folder / f"{number:06d}" for number in range(parts)]
    counts = [json.loads(stem.with_suffix(".json").read_text()) for stem in stems]
    totals = {key: sum(part[key] for part in counts) for key in ("documents", "tokens", "bytes", "empty")}
    if not totals["documents"]:
        raise UserError(f"the inputs hold no text ({totals['empty']} empty documents)")
    dtype = np.dtype(token_dtype(encoder.vocab_size)).name
    info = PreparedInfo(
        prefix, tokenizer, encoder.fingerprint, encoder.vocab_size, dtype=dtype, recipe=recipe, **totals
    )
    with (folder / "merged.bin").open("wb") as output:
        for stem in stems:
            with stem.with_suffix(".bin").open("rb") as part:
                shutil.copyfileobj(part, output, 1 << 22)
        output.flush()
        os.fsync(output.fileno())
    lengths = np.concatenate([np.fromfile(stem.with_suffix(".len"), np.int32) for stem in stems])
    write_index(folder / "merged.idx", lengths, dtype)
    write_json(folder / "merged.json", asdict(info))
    # An old corpus loses its index first: no moment shows a .bin with another corpus's .idx.
    for suffix in (".json", ".idx"):
        Path(prefix + suffix).unlink(missing_ok=True)
    for suffix in (".bin", ".idx", ".json"):
        (folder / f"merged{suffix}").replace(prefix + suffix)
    return info


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that is whole whenever it can be seen."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)

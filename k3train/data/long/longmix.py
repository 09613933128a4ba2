"""Corpora of long samples: `<prefix>.bin`, `.idx` and `.json` as `prepare` writes them, a document a sample.

`<prefix>.tasks.jsonl` has a line for each answer: {"sample": n, "task": kind, "question": first token,
"answer": [start, stop], "evidence": [[start, stop], ..], "text": answer}, positions in tokens of the sample.
A sample is a function of its number, the sources and the options alone: any number of processes may share
the work.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ..bundled import bundled_corpus
from ..indexed import open_corpus, token_dtype
from ..prepare import (
    PreparedInfo,
    already_made,
    part_is_whole,
    parts_folder,
    prepare,
    publish,
    read_info,
    recipe_of,
    write_json,
)
from ..sources import find_inputs
from ..tokenizer import Tokenizer, load_tokenizer
from ..workers import Progress, run_shards
from .corpus import Corpus
from .mix import LongSample, Mixer, Mixture
from .tasks import KINDS, PARTS, PASSAGE, SHORTEST_PART, Span, Task
from .wording import WORDINGS

SHARD_TOKENS = 4 << 20
BUNDLED = "bundled"
"""Name of the bundled corpus as a source: its training split."""
TASKS = ".tasks.jsonl"
SEEDS = 1 << 64
NEEDS = {
    "source": f"{PASSAGE} tokens that one document alone has",
    "continue": f"documents of at least {PARTS * SHORTEST_PART} tokens",
}
"""What the documents must hold for a task to be asked at all."""
# Changes when the same sources and options would give other samples.
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """Samples [first, first + count)."""

    number: int
    first: int
    count: int
    size: int
    """Bytes of their tokens."""


@dataclass(frozen=True)
class Job:
    """What every worker needs besides its shard."""

    folder: str
    tokenizer: str
    prefixes: tuple[str, ...]
    mixture: Mixture
    seed: int


def longmix(
    sources: list[str],
    output_prefix: str,
    mixture: Mixture,
    samples: int,
    *,
    seed: int,
    workers: int,
    tokenizer: str | None = None,
    text_key: str = "text",
    resume: bool = True,
    progress: bool = True,
    shard_tokens: int = SHARD_TOKENS,
) -> PreparedInfo:
    """Make `samples` of `sources`: prefixes of prepared corpora, `bundled`, and whatever `prepare` reads.

    Raises:
        UserError: an option is out of range, sources hold no documents or fewer tokens than a sample, they
            are of different tokenizers, the tasks do not fit, none can be asked of these documents, or a
            source or another corpus stands at `output_prefix`.
    """
    _check(mixture, samples, workers, seed)
    output_prefix = str(Path(output_prefix).expanduser())
    if not Path(output_prefix).name or Path(output_prefix).is_dir():
        raise UserError(f"output prefix {output_prefix!r} is a folder; name files in it, as in data/long")
    tokenizer, encoder = _tokenizer(sources, tokenizer)
    mixture.check_codes(encoder)
    try:
        _check_output(sources, output_prefix)
        recipe = _recipe(sources, encoder, text_key, [asdict(mixture), samples, seed, shard_tokens])
        finished = already_made(output_prefix, recipe) if resume else None
        if finished is not None and Path(output_prefix + TASKS).is_file():
            return finished
        Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
        shards = _shards(mixture, samples, shard_tokens, np.dtype(token_dtype(encoder.vocab_size)).itemsize)
        with _prepared(sources, output_prefix, tokenizer, encoder, text_key, workers, progress) as prefixes:
            _try_one(prefixes, encoder, mixture, seed)
            with parts_folder(output_prefix, recipe, resume) as folder:
                job = Job(str(folder), tokenizer, prefixes, mixture, seed)
                todo = [shard for shard in shards if not part_is_whole(folder, shard.number)]
                run_shards(build_part, job, todo, workers, Progress(shards, todo, shown=progress))
                _check_asked(folder, len(shards), mixture.kinds)
                _publish_tasks(folder, len(shards), output_prefix)
                info = publish(folder, len(shards), output_prefix, tokenizer, encoder, recipe)
    except OSError as error:
        raise UserError(f"{error.filename or output_prefix}: {error.strerror or error}") from error
    return info


def build_part(job: Job, shard: Shard, progress: Any) -> None:
    """Write one shard's samples and tasks; its `.json`, written last, declares them whole."""
    encoder = load_tokenizer(job.tokenizer)
    dtype = token_dtype(encoder.vocab_size)
    mixer = Mixer(open_sources(job.prefixes, encoder), encoder, job.mixture, job.seed)
    stem = Path(job.folder) / f"{shard.number:06d}"
    text_bytes = 0
    with stem.with_suffix(".bin").open("wb") as tokens, stem.with_suffix(".tasks").open("w") as tasks:
        for index in range(shard.first, shard.first + shard.count):
            sample = mixer[index]
            tokens.write(sample.ids.astype(dtype).tobytes())
            tasks.writelines(f"{json.dumps(task.record(index))}\n" for task in sample.tasks)
            text_bytes += len(encoder.decode(sample.ids[:-1].tolist()).encode())
            progress(sample.ids.size * np.dtype(dtype).itemsize, sample.ids.size)
        for stream in (tokens, tasks):
            stream.flush()
            os.fsync(stream.fileno())
    np.full(shard.count, job.mixture.length, np.int32).tofile(stem.with_suffix(".len"))
    counts = {"documents": shard.count, "tokens": shard.count * job.mixture.length, "bytes": text_bytes}
    write_json(stem.with_suffix(".json"), counts | {"empty": 0, "itemsize": np.dtype(dtype).itemsize})


def read_tasks(prefix: str) -> list[tuple[int, Task]]:
    """(sample, task) for each line beside a corpus, at least one.

    Raises:
        UserError: there are none, the corpus is missing or torn, or a line does not fit it.
    """
    path = Path(prefix + TASKS).expanduser()
    if not path.is_file():
        raise UserError(f"{path} does not exist; `k3train data longmix` writes it beside its corpus")
    lengths = open_corpus(prefix).lengths
    found: list[tuple[int, Task]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            found.append(_entry(json.loads(line), lengths))
            first, sample = found[0][0], found[-1][0]
            if lengths[sample] != lengths[first]:
                raise ValueError(f"samples {first} and {sample} are of different lengths")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: no task of this corpus ({error})") from error
    if not found:
        raise UserError(f"{path} is empty: its samples ask nothing; make others, as with --tasks needle")
    return found


def _entry(entry: Any, lengths: npt.NDArray[np.int32]) -> tuple[int, Task]:
    """A line of the file of tasks. Raises ValueError for what does not fit samples of `lengths` [n]."""
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    for key in ("sample", "task", "question", "answer", "evidence", "text"):
        if key not in entry:
            raise ValueError(f"it has no {key}")
    sample, kind, question, text = (entry[key] for key in ("sample", "task", "question", "text"))
    if kind not in KINDS:
        raise ValueError(f"task {kind}; valid are {', '.join(KINDS)}")
    if type(sample) is not int or not 0 <= sample < lengths.size:
        raise ValueError(f"sample {sample}; the corpus has 0 to {lengths.size - 1}")
    answer = _span("answer", entry["answer"], int(lengths[sample]))
    if type(question) is not int or not 0 < question <= answer.start:
        raise ValueError(f"question {question}; it begins behind token 0 and not behind its answer")
    if not isinstance(entry["evidence"], list) or not entry["evidence"]:
        raise ValueError("no evidence")
    if not isinstance(text, str):
        raise ValueError(f"text {text}")
    evidence = tuple(_span("evidence", span, question) for span in entry["evidence"])
    return sample, Task(kind, question, answer, evidence, text)


def _span(name: str, value: Any, limit: int) -> Span:
    if isinstance(value, list) and len(value) == 2 and all(type(place) is int for place in value):
        span = Span(*value)
        if 0 <= span.start < span.stop <= limit:
            return span
    raise ValueError(f"{name} {value}; a [start, stop] within {limit} tokens is expected")


def read_samples(prefix: str, tokenizer: Tokenizer) -> Iterator[LongSample]:
    """The samples of a corpus that ask something, with their tasks.

    Raises:
        UserError: the corpus is missing, torn, or of another tokenizer.
    """
    found, corpus = read_tasks(prefix), open_corpus(prefix)
    _check_tokenizer(prefix, tokenizer)
    for sample, entries in groupby(found, key=lambda entry: entry[0]):
        tasks = tuple(task for _, task in entries)
        yield LongSample(corpus.read(sample).astype(np.int64), tasks)


def count_tasks(prefix: str) -> Counter[str]:
    """Answers by kind of task."""
    return Counter(task.kind for _, task in read_tasks(prefix))


def open_sources(prefixes: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """The documents of prepared corpora. Raises UserError where there are none."""
    return Corpus([open_corpus(prefix) for prefix in prefixes], tokenizer.eod_id)


def _check(mixture: Mixture, samples: int, workers: int, seed: int) -> None:
    for name, value in (("length", mixture.length), ("questions", mixture.questions)):
        if value < 1:
            raise UserError(f"{name}={value}; valid: 1 or more")
    for name, value in (("samples", samples), ("workers", workers)):
        if value < 1:
            raise UserError(f"{name}={value}; valid: 1 or more")
    if mixture.unasked < 0:
        raise UserError(f"unasked={mixture.unasked}; valid: 0 or more")
    if not 0 <= seed < SEEDS:
        raise UserError(f"seed={seed}; valid: 0 to 2**64 - 1")
    unknown = [kind for kind in mixture.kinds if kind not in KINDS]
    if unknown or not mixture.kinds:
        raise UserError(f"tasks={','.join(mixture.kinds)}; valid are some of {', '.join(KINDS)}")
    if mixture.wording not in WORDINGS:
        raise UserError(f"wording={mixture.wording}; valid are {', '.join(WORDINGS)}")


def _check_output(sources: list[str], output_prefix: str) -> None:
    """Refuse to write over what is read."""
    texts = _texts(sources)
    read = [f"{source}{suffix}" for source in sources if _is_prefix(source) for suffix in (".bin", ".idx")]
    read += map(str, find_inputs(texts) if texts else [])
    written = {Path(output_prefix + suffix).resolve() for suffix in (".bin", ".idx", ".json", TASKS)}
    for name in read:
        if Path(name).expanduser().resolve() in written:
            raise UserError(f"{name} is a source and would be written over; choose another --output")


def _check_asked(folder: Path, parts: int, kinds: tuple[str, ...]) -> None:
    """Refuse samples that ask nothing, and remove them."""
    if any((folder / f"{number:06d}.tasks").stat().st_size for number in range(parts)):
        return
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    needs = "; ".join(f"{kind} needs {NEEDS[kind]}" for kind in dict.fromkeys(kinds) if kind in NEEDS)
    remedy = "raise --questions" if set(kinds) - set(NEEDS) else "add needle to --tasks"
    raise UserError(
        f"tasks={','.join(kinds)}: nothing can be asked of these documents ({needs}); "
        f"name other sources, or {remedy}"
    )


def _is_prefix(source: str) -> bool:
    return Path(f"{source}.idx").expanduser().is_file()


def _tokenizer(sources: list[str], asked: str | None) -> tuple[str, Tokenizer]:
    """The tokenizer asked for, else that of the first prepared source, else bytes; all sources must agree."""
    prepared = [source for source in sources if _is_prefix(source)]
    infos = [info for info in map(read_info, prepared) if info is not None]
    chosen = asked or (infos[0].tokenizer if infos else "byte")
    encoder = load_tokenizer(chosen)
    for source in prepared:
        _check_tokenizer(source, encoder)
    return chosen, encoder


def _check_tokenizer(prefix: str, tokenizer: Tokenizer) -> None:
    info = read_info(prefix)
    if info is not None and info.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{prefix} was prepared with tokenizer {info.tokenizer} ({info.fingerprint}), and "
            f"{tokenizer.fingerprint} is used here; use that tokenizer or prepare it again"
        )


def _texts(sources: list[str]) -> list[str]:
    return [source for source in sources if source != BUNDLED and not _is_prefix(source)]


def _recipe(sources: list[str], encoder: Tokenizer, text_key: str, options: list[Any]) -> str:
    """What the samples follow from: the sources in their order, and the options."""
    identity: list[Any] = []
    for source in sources:
        if source == BUNDLED:
            identity.append(bundled_corpus(encoder)[0])
        elif _is_prefix(source):
            status = Path(f"{source}.bin").expanduser().stat()
            identity.append([str(Path(source).expanduser().resolve()), status.st_size, status.st_mtime_ns])
    texts = _texts(sources)
    if texts:
        identity.append(recipe_of(find_inputs(texts), encoder, text_key))
    settings = [FORMAT, encoder.fingerprint, identity, options]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


@contextmanager
def _prepared(
    sources: list[str],
    output_prefix: str,
    tokenizer: str,
    encoder: Tokenizer,
    text_key: str,
    workers: int,
    progress: bool,
) -> Iterator[tuple[str, ...]]:
    """Prefixes of all sources; texts are prepared for the while, in a hidden folder beside the output."""
    texts = _texts(sources)
    found = [bundled_corpus(encoder)[0] if name == BUNDLED else name for name in sources if name not in texts]
    if not texts:
        yield tuple(found)
        return
    output = Path(output_prefix)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".texts", dir=output.parent) as folder:
        prefix = str(Path(folder) / "texts")
        prepare(texts, prefix, tokenizer, workers=workers, text_key=text_key, progress=progress)
        yield (*found, prefix)


def _try_one(prefixes: tuple[str, ...], encoder: Tokenizer, mixture: Mixture, seed: int) -> None:
    """Refuse before any work what would fail in it."""
    corpus = open_sources(prefixes, encoder)
    if corpus.num_tokens < mixture.length:
        raise UserError(
            f"length {mixture.length}: the sources hold {corpus.num_tokens} tokens, less than one sample; "
            "name more, or take shorter samples"
        )
    Mixer(corpus, encoder, mixture, seed)[0]


def _shards(mixture: Mixture, samples: int, shard_tokens: int, itemsize: int) -> list[Shard]:
    each = max(1, shard_tokens // mixture.length)
    counts = [min(each, samples - first) for first in range(0, samples, each)]
    return [
        Shard(number, number * each, count, count * mixture.length * itemsize)
        for number, count in enumerate(counts)
    ]


def _publish_tasks(folder: Path, parts: int, prefix: str) -> None:
    """Join the tasks of all parts; an old corpus loses its index first."""
    with (folder / "merged.tasks").open("wb") as output:
        for number in range(parts):
            with (folder / f"{number:06d}.tasks").open("rb") as part:
                shutil.copyfileobj(part, output)
        output.flush()
        os.fsync(output.fileno())
    for suffix in (".json", ".idx"):
        Path(prefix + suffix).unlink(missing_ok=True)
    (folder / "merged.tasks").replace(prefix + TASKS)

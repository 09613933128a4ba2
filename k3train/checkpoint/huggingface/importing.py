"""`k3train convert import`: a Hugging Face folder becomes a run of no steps with a checkpoint of weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ... import __version__
from ...config import Config
from ...config_file import to_yaml
from .. import tensors
from ..folders import complete
from . import assets
from .config import Description
from .exchange import Record, bar, building, fill
from .keys import Piece
from .reader import HuggingFaceTensors
from .writer import Shard, plan_shards

STEP = 0
RECIPE = "imported"
"""`recipe` in the configuration of an imported run; no such recipe exists, so that none continues it."""


@dataclass
class ImportJob:
    """Files of one checkpoint out of a Hugging Face folder; see `exchange.Job`."""

    source: Path
    limit: int
    lenient: bool

    @cached_property
    def opened(self) -> HuggingFaceTensors:
        """The source, checked."""
        return HuggingFaceTensors(self.source, lenient=self.lenient)

    @cached_property
    def shards(self) -> list[Shard]:
        """What each file holds."""
        return plan_shards(self.opened.pieces, self.limit, "__{0}_0.distcp")

    def files(self) -> list[str]:
        """See `exchange.Job`."""
        folder = complete(Path("checkpoints"), STEP)
        return [str(folder / shard.name) for shard in self.shards]

    def write(self, index: int, path: Path) -> Record:
        """See `exchange.Job`."""
        parts = ((piece.name, piece.first, self._rows(piece)) for piece in self.shards[index].pieces)
        written, checksum = tensors.write_file(path, parts)
        return {"checksum": checksum, "parts": written}

    def _rows(self, piece: Piece) -> Any:
        return self.opened.shards.read_rows(piece, self.opened.dtype)


def import_folder(source: Path, target: Path, *, workers: int, limit: int, lenient: bool = False) -> str:
    """Import `source` as the run folder `target`; a line that says what was made.

    Args:
        limit: bytes of one file, which no process exceeds in memory but for a single larger tensor.
        lenient: carry over keys of `config.json` that are not known here.

    Raises:
        UserError: the source is damaged or no model of ours, or the target cannot be written.
    """
    job = ImportJob(source.resolve(), limit, lenient)
    description, need = job.opened.description, sum(piece.nbytes for piece in job.opened.pieces)
    identity = {"import": str(job.source), "limit": limit, "source": job.opened.shards.fingerprint()}
    with building(target, identity, need) as folder:
        config = _configuration(description, target, assets.tokenizer(source))
        assets.copy_assets(source, folder / assets.FOLDER, config=True)
        with bar(len(job.files())) as progress:
            records = fill(job, folder, workers, progress)
        _finish(complete(folder / "checkpoints", STEP), config, records)
        (folder / "config.yaml").write_text(to_yaml(config))
    packed = ", MXFP4 unpacked exactly" if description.layout.packed else ""
    return f"{target}: {len(job.opened.pieces)} tensors{packed}; start from it with init_from={target}"


def _configuration(description: Description, target: Path, tokenizer: Path | None) -> Config:
    config = Config(recipe=RECIPE, model=description.model)
    if description.vision is not None:
        config.vision = description.vision
    config.run.name, config.run.dir = target.name, str(target)
    config.parallel.data, config.parallel.zero = 1, 0
    if tokenizer is not None:
        config.data.tokenizer = str(target.resolve() / assets.FOLDER / tokenizer.name)
    return config


def _finish(folder: Path, config: Config, records: dict[str, Record]) -> None:
    files = {
        Path(name).name: [tensors.Written(*part) for part in record["parts"]]
        for name, record in records.items()
    }
    checksums = {Path(name).name: record["checksum"] for name, record in records.items()}
    content = {
        "step": STEP,
        "k3train": __version__,
        "layout": {},
        "fixed": {"recipe": RECIPE},
        "extra": {"step": STEP, "skipped": 0},
    }
    tensors.finish(folder, files, checksums, content)

"""`k3train convert export`: a run's newest weights as a folder that inference engines load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from ...config import Config
from ...config_file import load_yaml
from ...errors import UserError
from ...initial import shapes_of
from ...vision_config import VisionConfig
from ...vision_shapes import PREFIX
from .. import folders, manifest
from ..sources import Tensors, open_weights
from ..tensors import CheckpointTensors
from ..verify import newest
from . import assets
from .config import FILE, build, read_json
from .exchange import Record, bar, building, fill
from .keys import Layout, Piece, pieces
from .writer import CHECKSUMS, Shard, plan_shards, write_checksums, write_index, write_shard


@dataclass
class ExportJob:
    """Shards of one Hugging Face folder out of a checkpoint; see `exchange.Job`."""

    run: Path
    step: int
    layout: Layout
    rounding: str
    limit: int
    tower_from: Path | None = None
    """Weights of the vision tower, where the run has none."""

    @cached_property
    def config(self) -> Config:
        """The run's configuration."""
        return load_yaml(self.run / "config.yaml")

    @cached_property
    def source(self) -> CheckpointTensors:
        """The run's checkpoint."""
        return CheckpointTensors(folders.complete(self.run / "checkpoints", self.step))

    @cached_property
    def shards(self) -> list[Shard]:
        """What each file holds."""
        return plan_shards(pieces(self.config.model, self.vision, self.layout), self.limit)

    @cached_property
    def vision(self) -> VisionConfig | None:
        """The tower's shape, if there is one."""
        if self.tower_from is None:
            return self.config.vision if self.config.vision.enabled else None
        if self.config.vision.enabled:
            raise UserError(f"{self.run}: has a vision tower of its own; leave --tower-from out")
        _, vision = shapes_of(str(self.tower_from))
        if vision is None:
            raise UserError(f"{self.tower_from}: has no vision tower")
        return vision

    @cached_property
    def tower(self) -> Tensors:
        """Where the tower's weights are."""
        return self.source if self.tower_from is None else open_weights(self.tower_from)

    def files(self) -> list[str]:
        """See `exchange.Job`."""
        return [shard.name for shard in self.shards]

    def write(self, index: int, path: Path) -> Record:
        """See `exchange.Job`."""
        return {"checksum": write_shard(path, self.shards[index], self._rows, self.rounding)}

    def _rows(self, piece: Piece) -> Tensor:
        if piece.kind in ("vision", "projector"):
            return self.tower.read(piece.name)
        return self.source.read(piece.name, piece.first, piece.shape[0])

    def check(self) -> None:
        """Compare the checkpoint's tensors with those of its configuration; raises UserError."""
        ends: dict[str, tuple[int, ...]] = {}
        for shard in self.shards:
            for piece in shard.pieces:
                ends[piece.name] = (piece.first + piece.shape[0], *piece.shape[1:])
        for name, shape in ends.items():
            source = self.tower if name.startswith(f"{PREFIX}.") else self.source
            if (found := source.shape(name)) != shape:
                raise UserError(
                    f"{self.run}: {name} has the shape {list(found)}, and should have {list(shape)}"
                )


def export_run(
    run: Path,
    target: Path,
    *,
    layout: Layout,
    workers: int,
    limit: int,
    rounding: str | None = None,
    carry_from: Path | None = None,
    tower_from: Path | None = None,
) -> str:
    """Export the newest complete checkpoint of `run` to the folder `target`; a line that says what was made.

    Args:
        limit: bytes of one file, unless a single tensor is larger.
        rounding: of MXFP4's scales; that of the run's own training when left out.
        carry_from: folder of the tokenizer and other files; those that the run holds when left out.
        tower_from: Hugging Face folder or run whose vision tower is taken, where the run has none.

    Raises:
        UserError: the run has no intact checkpoint, or the layout cannot hold its model.
    """
    run = run.resolve()
    config = load_yaml(run / "config.yaml")
    if layout.mtp and not config.model.mtp_layers:
        raise UserError(f"{run}: has no multi-token-prediction layer; leave --mtp out")
    quant = config.quant
    trained = quant.recipe != "none"
    if layout.packed and trained and quant.weight_format != "mxfp4":
        raise UserError(
            f"quant.weight_format={quant.weight_format}: the released layout packs mxfp4; leave --packed out"
        )
    step = newest(run / "checkpoints")
    job = ExportJob(run, step, layout, rounding or quant.scale_rounding, limit, tower_from)
    carried = carry_from or (run / assets.FOLDER if (run / assets.FOLDER).is_dir() else None)
    base = read_json(carried / FILE) if carried is not None and (carried / FILE).is_file() else None
    official = build(config.model, job.vision, layout, base)
    job.check()
    identity = {
        "export": str(run),
        "manifest": manifest.checksum(job.source.folder / manifest.NAME),
        "layout": vars(layout),
        "rounding": job.rounding,
        "limit": limit,
        "tower": str(tower_from and tower_from.resolve()),
    }
    need = sum(piece.nbytes for shard in job.shards for piece in shard.pieces)
    with building(target, identity, need) as folder:
        with bar(len(job.shards)) as progress:
            records = fill(job, folder, workers, progress)
        if carried is not None:
            assets.copy_assets(carried, folder)
        (folder / FILE).write_text(json.dumps(official, indent=2) + "\n")
        write_index(folder, job.shards)
        write_checksums(folder, {name: record["checksum"] for name, record in records.items()})
    left = _left_out(config, layout, job.vision is None and bool(base and base.get("vision_config")))
    form = "MXFP4 experts" + ("" if trained else ", rounded now") if layout.packed else layout.dtype
    files = f"{len(job.shards)} files ({form}); {CHECKSUMS} lists them"
    return f"{target}: step {step} of {run}, in {files}{left}"


def _left_out(config: Config, layout: Layout, tower: bool) -> str:
    """What a person should know is not in the folder."""
    parts = []
    if config.model.mtp_layers and not layout.mtp:
        parts.append("the multi-token-prediction layer, which no release has")
    if tower:
        parts.append("the vision tower, which --tower-from DIR would take from the weights it started with")
    return f"\nleft out: {'; '.join(parts)}" if parts else ""

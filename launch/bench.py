"""`k3train bench calibrate`: measure this machine, and write what `cluster.calibration` reads."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3train import calibration
from k3train.config import Config
from k3train.errors import UserError

from .compose import compose, resolve_layout, world_size

STEPS, QUICK_STEPS = 8, 3
TIMEOUT = 900
"""Seconds for one kind of measurement."""
OPTIONS = ("out", "ranks", "steps")


def main(arguments: Sequence[str]) -> int:
    """Measure, write, and print what was measured beside the hardware entry; the exit status."""
    verb, *rest = [*arguments] or ["(nothing)"]
    if verb != "calibrate":
        raise UserError(f"bench: {verb} is no bench; valid is calibrate")
    as_json, quick = "--json" in rest, "--quick" in rest
    options, overrides = _split([each for each in rest if each not in ("--json", "--quick")])
    composed = compose(overrides)
    config = resolve_layout(composed, world_size(composed))
    file = Path(options.get("out", "calibration.json")).expanduser()
    steps = _number(options, "steps", QUICK_STEPS if quick else STEPS)
    ranks = _number(options, "ranks", config.cluster.ranks_per_node or 1)
    content = merged(file, measure(config, overrides, ranks=ranks, steps=steps))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"out={file}: cannot be written ({error.strerror}); name another file") from error
    if as_json:
        print(json.dumps({"file": str(file), **content}))
        return 0
    _show(config, content, file)
    return 0


def measure(config: Config, overrides: Sequence[str], *, ranks: int, steps: int) -> dict[str, Any]:
    """Content of a calibration: of layers alone and `ranks` at once, of operators, and of collectives.

    Raises UserError where a process fails.
    """
    clean = [each for each in overrides if not each.startswith("cluster.calibration=")]
    found: dict[str, Any] = {
        "schema": calibration.SCHEMA,
        "machine": {"date": time.strftime("%Y-%m-%d"), "gpu": config.cluster.gpu, "ranks": ranks},
        "cluster": _run("coefficients", clean, 1, steps)[0],
        "measured": {"shapes": {calibration.shape_key(config): {}}},
    }
    by_ranks = found["measured"]["shapes"][calibration.shape_key(config)]
    for count in dict.fromkeys((1, ranks)):
        by_ranks[str(count)] = median(_run("layers", clean, count, steps))
    if ranks > 1:
        found["measured"]["collectives"] = _run("collectives", clean, ranks, steps)[0]
    return found


def merged(file: Path, new: dict[str, Any]) -> dict[str, Any]:
    """A file's older shapes and collectives kept beside those just measured."""
    if not file.exists():
        return new
    old = calibration.read(str(file))
    measured, fresh = dict(old.get("measured", {})), new["measured"]
    shapes = {**measured.get("shapes", {})}
    for key, by_ranks in fresh["shapes"].items():
        shapes[key] = {**shapes.get(key, {}), **by_ranks}
    return {**new, "measured": {**measured, **fresh, "shapes": shapes}}


def median(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the same figures found several times, number by number; what is no number is the first's."""
    first = found[0]

    def middle(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: middle([value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], list):
            return [middle(list(each)) for each in zip(*values, strict=True)]
        return statistics.median(values)

    return {key: middle([each[key] for each in found]) for key in first}


def _run(kind: str, overrides: Sequence[str], ranks: int, steps: int) -> list[Any]:
    """Answers of `ranks` processes of `launch.calibrate` at once, each on a core or a GPU of its own."""
    print(f"calibrating {kind} on {ranks} rank{'s' * (ranks > 1)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="k3train-") as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "launch.calibrate", kind, str(file), str(steps), *overrides],
                env=_environment(kind, rank, ranks, Path(folder)),
                stdout=subprocess.DEVNULL,
                stderr=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank, file in enumerate(files)
        ]
        try:
            codes = [process.wait(TIMEOUT) for process in processes]
        except subprocess.TimeoutExpired:
            raise UserError(f"bench calibrate: {kind} were not done within {TIMEOUT} s") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        if any(codes):
            raise UserError(f"bench calibrate: measuring {kind} ended with status {max(codes, key=abs)}")
        return [json.loads(file.read_text()) for file in files]


def _environment(kind: str, rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """Of one process: with the others in a group for collectives, else alone on its device."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    kept["OMP_NUM_THREADS"] = "1"
    if kind == "collectives":
        kept |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        kept["K3TRAIN_RENDEZVOUS"] = str(folder / "rendezvous")
    else:
        visible = kept.get("CUDA_VISIBLE_DEVICES", "").split(",") if kept.get("CUDA_VISIBLE_DEVICES") else []
        kept["CUDA_VISIBLE_DEVICES"] = visible[rank] if rank < len(visible) else str(rank)
    return kept


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in OPTIONS and value:
            options[key] = value
        else:
            overrides.append(argument)
    return options, overrides


def _number(options: dict[str, str], name: str, default: int) -> int:
    value = options.get(name, str(default))
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"{name}={value}: is not 1 or more")
    return int(value)


def _show(config: Config, content: dict[str, Any], file: Path) -> None:
    """Measured figures beside those of the entry."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Measured, beside cluster {config.cluster.name}", title_justify="left")
    for name in ("key", "measured", "entry"):
        table.add_column(name, justify="left" if name == "key" else "right")
    for key, value in content["cluster"].items():
        section, _, name = key.rpartition(".")
        owner = config.cluster.efficiency if section else config.cluster
        table.add_row(f"cluster.{key}", f"{value:.4g}", f"{getattr(owner, name):.4g}")
    for name, (latency, bandwidth) in content["measured"].get("collectives", {}).items():
        table.add_row(f"{name} of {config.cluster.ranks_per_node} ranks", f"{latency * 1e6:.0f} us", "")
        table.add_row("", f"{bandwidth / 1e9:.3g} GB/s", f"{config.cluster.link_gbps:.3g} GB/s")
    console = Console()
    console.print(table)
    layers = Table(title="Layers of a micro-batch, ms", title_justify="left")
    for name in ("ranks at once", "layer", "forward", "backward"):
        layers.add_column(name, justify="left" if name == "layer" else "right")
    for count, found in content["measured"]["shapes"][calibration.shape_key(config)].items():
        for kind, by_sources in found["layers"].items():
            mean = [statistics.mean(pair[way] for pair in by_sources.values()) for way in (0, 1)]
            layers.add_row(count, kind, *(f"{1e3 * each:.2f}" for each in mean))
        layers.add_row(count, "output", *(f"{1e3 * each:.2f}" for each in found["output"]))
    console.print(layers)
    print(f"{file}\nuse it with cluster.calibration={file}")

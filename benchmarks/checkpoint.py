"""How long a checkpoint stops training: asynchronous beside synchronous saves of one model, in one run.

Workload: the recipe's model and optimizer state (tiny on one rank unless told otherwise), all in seconds,
medians; the JSON holds every value. `blocked` is how long `save` keeps the training loop, `until published`
how long it takes until the checkpoint is complete. `step while writing` is the training step beside an
asynchronous write, to be held against `undisturbed_step` in the JSON. The third kind saves to a local disk,
where it is published, and is then uploaded; here both are one disk, so that it shows what the copy costs.
`load` verifies every checksum first. The disk is that of --folder (the system's temporary folder by default);
its cache is warm for the load.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from k3train.config import Config
from k3train.quiet import quiet
from k3train.resume import fixed_keys
from launch.compose import compose, resolve_layout, world_size
from parallel.cpu import enable_cpu

LOCAL = "local, then uploaded"
KINDS = ("synchronous", "asynchronous", LOCAL)
QUICK = ("model.num_layers=5", "data.sequence_length=64", "run.microbatches=1", "eval.batches=1")


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go, for the time of the run")
    parser.add_argument(
        "overrides", nargs="*", help="configuration overrides; recipe=tiny parallel=single first"
    )
    options = parser.parse_args()
    quiet()
    enable_cpu()
    chosen = ["recipe=tiny", "parallel=single", *(QUICK if options.quick else ()), *options.overrides]
    composed = compose(chosen)
    config = resolve_layout(composed, world_size(composed))
    saves = 2 if options.quick else options.saves
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures, rows = measure(config, Path(folder), saves)
    workload = {"overrides": chosen, "saves": saves}
    report.publish({"benchmark": "checkpoint", "workload": workload, **figures}, rows, options.json)


def measure(config: Config, folder: Path, saves: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All seconds, and a row for each kind of save."""
    from k3train.layout import layout_of
    from k3train.train.assemble import build_trainer, set_numerics
    from k3train.train.inputs import Inputs
    from k3train.train.step import train_step
    from parallel.groups import destroy, initialize

    set_numerics(config)
    groups = initialize(layout_of(config), device=config.run.device, timeout_minutes=5, seed=1)
    inputs, trainer = Inputs(config, groups), build_trainer(config, groups)
    steps = iter(range(1, 1_000_000))

    def step() -> float:
        start = time.perf_counter()
        train_step(trainer, inputs.next_step(), next(steps))
        return time.perf_counter() - start

    step()  # the optimizer makes its state
    figures: dict[str, Any] = {"undisturbed_step": [step() for _ in range(saves)]}
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        root = folder / kind
        told: list[str] = []
        manager = _manager(config, groups, root, kind, told)
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(1, saves + 1):
            start = time.perf_counter()
            manager.save(number, trainer.modules, trainer.optimizer, {"step": number})
            seconds["blocked"].append(time.perf_counter() - start)
            if kind != "synchronous":
                seconds["step while writing"].append(step())
            if not manager.wait():
                raise SystemExit(told[-1])
            seconds["until published"].append(time.perf_counter() - start)
            if kind == LOCAL:
                manager.finish()
                seconds["until uploaded"].append(time.perf_counter() - start)
        start = time.perf_counter()
        if manager.load(trainer.modules, trainer.optimizer) != {"step": saves}:
            raise SystemExit("the last checkpoint was not the one that was loaded")
        seconds["load"].append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in max(root.iterdir()).rglob("*") if path.is_file())
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        rows.append({"save": kind, **medians, "MB": size / 1e6})
        figures[kind] = {**seconds, "bytes": size}
    for entry in rows:
        entry["blocked / synchronous"] = entry["blocked"] / rows[0]["blocked"]
    figures["blocked_ratio"] = rows[1]["blocked / synchronous"]
    inputs.close()
    destroy()
    return figures, rows


def _manager(config: Config, groups: Any, root: Path, kind: str, told: list[str]) -> Any:
    from k3train.checkpoint.local import join
    from k3train.checkpoint.manager import CheckpointManager

    def disk() -> Any:
        return join(str(root.with_name("disk")), root, groups.rank, keep=1, need_bytes=0)

    return CheckpointManager(
        root,
        groups=groups,
        keep=1,
        asynchronous=kind != "synchronous",
        local=disk if kind == LOCAL else None,
        fixed=fixed_keys(config),
        message=told.append,
    )


if __name__ == "__main__":
    main()

"""Gradient memory and step time of pipeline ZeRO-2 against ZeRO-1, and the file store against its disk.

Workload: on two GPUs DP2 with four chunks on each rank, h200_small with sequences of 4,096 tokens, 8
micro-batches in groups of 4; on a CPU DP4 with four chunks on each of four ranks, 8 layers of the tiny model,
two groups of 2. All kinds are built in one process and take whole training steps in turn; ratios are medians
of the rounds. Overrides make other layouts of as many ranks.

`gradients` counts the distinct storages behind all gradients of the rank's chunks between operations, at its
most; `allocator` is the same from the GPU allocator's books: what ZeRO-2 holds after a step, less what ZeRO-1
holds, plus ZeRO-1's buffers. `formula` is 4 N / DP + 2 x 4 x the largest chunk, with the padding of buckets.

The disk: vectors through `FileShelf`, with their headers and checksums, against the bare asynchronous engine
with as many requests under way, on the same file system, bytes of both passes over their seconds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.ranks import run_ranks

CPU = (
    "recipe=tiny", "optim=adamw", "vision=none", "data.images=[]", "model.num_layers=8", "model.mtp_layers=0",
    "parallel.data=4", "parallel.pipeline=1", "parallel.virtual=4", "parallel.layers_per_chunk=null",
    "parallel.microbatch_group=2", "run.microbatches=4", "data.sequence_length=128",
)  # fmt: skip
GPU = (
    "recipe=h200_small", "optim=adamw", "run.deterministic=false", "parallel.data=2", "parallel.virtual=4",
    "parallel.microbatch_group=4", "run.microbatches=8", "data.sequence_length=4096",
)  # fmt: skip
KINDS = {
    "ZeRO-1": ("parallel.zero=1",),
    "ZeRO-2": ("parallel.zero=2",),
    "ZeRO-2, host": ("parallel.zero=2", "offload.gradients=host"),
    "ZeRO-2, nvme": ("parallel.zero=2", "offload.gradients=nvme"),
    "ZeRO-1, states on host": ("parallel.zero=1", "offload.optimizer=host"),
}
QUICK = ("model.num_layers=4",)
ROUNDS, QUICK_ROUNDS = 12, 2
VECTORS, QUICK_VECTORS = 16, 6
VECTOR_BYTES, QUICK_VECTOR_BYTES = 256 << 20, 32 << 20
TIMEOUT = 900


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help=f"steps of each kind ({ROUNDS}, quick {QUICK_ROUNDS})")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the temporary folder)")
    parser.add_argument("--kind", action="append", help="of step, beside ZeRO-1; repeatable (all)")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parser.parse_args()
    import torch

    cuda = torch.cuda.is_available()
    chosen = ["ZeRO-1", *(options.kind or (["ZeRO-2"] if options.quick else list(KINDS)[1:]))]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = {
            "overrides": [
                *(GPU if cuda else CPU),
                *(QUICK if options.quick else ()),
                f"offload.nvme_dir={folder}",
                *options.overrides,
            ],
            "kinds": {name: KINDS[name] for name in dict.fromkeys(chosen)},
            "rounds": options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
        }
        rows = run_ranks("benchmarks.zero2:measure", 2 if cuda else 4, arguments, timeout=TIMEOUT)
        disk = disk_rates(Path(folder), options.quick)
    by_kind = {row["kind"]: row for row in rows}
    zero2 = by_kind.get("ZeRO-2", rows[-1])
    figures = {
        "benchmark": "zero2",
        "peak_gradient_bytes": zero2["gradients"],
        "formula_bytes": zero2["formula"],
        "zero1_bytes": by_kind["ZeRO-1"]["gradients"],
        "step_ratio_vs_zero1": zero2["ratio"],
        **disk,
        "rows": rows,
    }
    report.publish(figures, [*rows], options.json)


def measure(overrides: list[str], kinds: dict[str, list[str]], rounds: int) -> list[dict[str, Any]]:
    """A row for each kind of step; on every rank."""
    import torch

    lanes: dict[str, Lane] = {}
    first: Lane | None = None
    if torch.cuda.is_available():
        # One that is not measured makes what libraries keep for all, Transformer Engine's workspaces say.
        first = Lane([*overrides, *next(iter(kinds.values()))], None)
        first.step()
        first.settle()
    for name, more in kinds.items():
        lanes[name] = Lane([*overrides, *more], first)
        first = first or lanes[name]
        lanes[name].step()
        lanes[name].settle()
    losses = {name: lane.step() for name, lane in lanes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, lane in lanes.items():
            started = time.perf_counter()
            lane.step()
            seconds[name].append(time.perf_counter() - started)
    base = lanes["ZeRO-1"]
    rows = [
        {
            "kind": name,
            "gradients": lane.most,
            "formula": lane.formula(),
            "allocator": lane.held - base.held + base.most if lane.held else None,
            "seconds": statistics.median(seconds[name]),
            "fastest": min(seconds[name]),
            "slowest": max(seconds[name]),
            "ratio": statistics.median(
                own / other for own, other in zip(seconds[name], seconds["ZeRO-1"], strict=True)
            ),
            "loss": losses[name],
        }
        for name, lane in lanes.items()
    ]
    return rows


class Lane:
    """One way to hold gradients: a trainer of its own."""

    def __init__(self, overrides: list[str], first: Lane | None) -> None:
        import os

        import torch

        from k3train.layout import layout_of
        from k3train.train.assemble import build_trainer, set_numerics
        from launch.compose import compose, resolve_layout
        from parallel.groups import initialize
        from tests.dist.zero2_worker import Peak

        self.cuda = torch.cuda.is_available()
        self.before = allocated() if self.cuda else 0
        config = resolve_layout(compose(overrides), int(os.environ["WORLD_SIZE"]))
        set_numerics(config)
        if first is None:
            self.groups = initialize(layout_of(config), device=config.run.device, timeout_minutes=5, seed=1)
        else:
            self.groups = first.groups
        self.trainer = build_trainer(config, self.groups)
        self.peak: Peak | None = Peak(self.trainer)
        self.most = self.held = self.taken = 0

    def step(self) -> float:
        """One training step on the batches of its number; the loss. Ends when the device is idle."""
        import torch
        import torch.distributed as dist

        from k3train.train.step import train_step

        self.taken += 1
        batches = random_batches(self.trainer.config, self.groups, self.taken)
        result = train_step(self.trainer, batches, self.taken)
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return result.losses.loss

    def settle(self) -> None:
        """After the first step: read the counters, and count no more."""

        assert self.peak is not None
        self.most = self.peak.bytes
        self.peak.stop()
        self.held = allocated() - self.before if self.cuda else 0

    def formula(self) -> int:
        """4 N / DP + 2 x 4 x the largest chunk where shards are on the device; ZeRO-1's 4 N."""
        from k3train.gradient_plan import SLOTS

        config = self.trainer.config
        chunks = [
            [(b.numel, b.data_parallel_world_size) for b in chunk.buffers + chunk.expert_parallel_buffers]
            for chunk in self.trainer.chunks
        ]
        sizes = [sum(numel for numel, _ in chunk) for chunk in chunks]
        if config.parallel.zero == 1:
            return 4 * sum(sizes)
        shards = sum(4 * numel // ranks for chunk in chunks for numel, ranks in chunk)
        return 4 * SLOTS * max(sizes) + (shards if config.offload.gradients == "device" else 0)


def allocated() -> int:
    """Bytes in the GPU allocator's books without cuBLAS's workspaces, which the first lane makes for all."""
    import torch

    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def random_batches(config: Any, groups: Any, step: int) -> list[dict[str, Any]]:
    """Micro-batches of random tokens, different on each data-parallel rank; one document a sequence."""
    import torch

    from k3train.ops.packing import Packing

    generator = torch.Generator().manual_seed(1000 * step + groups.pg_collection.dp.rank())
    shape = (config.data.micro_batch_size, config.data.sequence_length + 1)
    made = []
    for _ in range(config.run.microbatches):
        window = torch.randint(0, 256, shape, generator=generator).to(groups.device)
        made.append(
            {
                "tokens": window[:, :-1].contiguous(),
                "labels": window[:, 1:].contiguous(),
                "loss_mask": torch.ones(shape[0], shape[1] - 1, device=groups.device),
                "sample_ids": torch.arange(shape[0]),
                "packing": Packing.single(shape[0], shape[1] - 1, groups.device),
            }
        )
    return made


def disk_rates(folder: Path, quick: bool) -> dict[str, Any]:
    """GB/s of the shelf and of the bare engine, writing everything and reading it back."""
    from offload.files.engine import default_engine

    size, count = (QUICK_VECTOR_BYTES, QUICK_VECTORS) if quick else (VECTOR_BYTES, VECTORS)
    rates: dict[str, list[float]] = {"shelf": [], "raw": []}
    for _ in range(1 if quick else 3):
        rates["raw"].append(2 * size * count / _raw_seconds(folder, size, count) / 1e9)
        rates["shelf"].append(2 * size * count / _shelf_seconds(folder, size, count) / 1e9)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "engine": type(default_engine()).__name__,
        "store_gbps": medians["shelf"],
        "disk_gbps": medians["raw"],
        "store_over_disk": medians["shelf"] / medians["raw"],
    }


def _raw_seconds(folder: Path, size: int, count: int) -> float:
    from offload.files.engine import aligned_bytes, default_engine
    from offload.shelf import BUFFERS

    engine = default_engine()
    buffers = [aligned_bytes(size).random_(0, 255) for _ in range(BUFFERS)]
    file = engine.open(folder)
    started = time.perf_counter()
    for call in (engine.write, engine.read):
        under_way: list[Any] = []
        for index in range(count):
            if len(under_way) == BUFFERS:
                under_way.pop(0).wait()
            under_way.append(call(file, index * size, buffers[index % BUFFERS]))
        for transfer in under_way:
            transfer.wait()
    seconds = time.perf_counter() - started
    engine.close(file)
    return seconds


def _shelf_seconds(folder: Path, size: int, count: int) -> float:
    import torch

    from offload.files.engine import default_engine
    from offload.shelf import FileShelf

    shelf = FileShelf(folder, default_engine(), pinned=False, fallback=False, warn=print)
    for key in range(count):
        shelf.reserve(key, size // 4)
    value = torch.randn(size // 4)
    for key in range(4):
        shelf.blank(key).copy_(value)
        shelf.commit(key)
    shelf.flush()
    started = time.perf_counter()
    for key in range(count):
        shelf.blank(key)
        shelf.commit(key)
    shelf.flush()
    # The last vectors are in buffers still: read the others first.
    for key in range(count):
        if key + 2 < count:
            shelf.request(key + 1)
            shelf.request(key + 2)
        shelf.open(key)
        shelf.release(key)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

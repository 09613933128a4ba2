"""A training step of k3train beside one of plain megatron-core of the same shape, in one run.

Workload: real text (the running Python's standard library, bytes), no checkpointing, no evaluation. The other
model is megatron-core's GPTModel with its own MLA, router, experts and data-parallel wrapper, of the same
layers, widths, experts, vocabulary, batch and optimizer. It has no KDA, AttnRes, output gates, shared latent
norm or MTP; on CPU, where its MLA does not run, it has grouped-query attention and experts of full width, so
the ratio there says nothing. MTP is off in both, every row is one document, and both clip gradients.

tokens/s counts all tokens of a step; MFU is the model's FLOPs (k3train.flops: recompute and optimizer not
counted, causal attention halved) over cluster.peak_tflops. Times are medians with the fastest and slowest.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.device import dismantle, synchronize, timed
from k3train import flops, shapes
from k3train.config import Config
from k3train.quiet import quiet
from launch.compose import compose, resolve_layout, world_size
from parallel.cpu import enable_cpu

QUICK = (
    "recipe=tiny", "parallel=single", "model.num_layers=5", "data.sequence_length=128", "run.microbatches=2",
)  # fmt: skip


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--recipe", action="append", default=[], help="recipe, may be repeated")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the dearest operators of one step")
    parser.add_argument("--no-baseline", action="store_true", help="leave plain megatron-core out")
    parser.add_argument("overrides", nargs="*", help="configuration overrides for all recipes")
    options = parser.parse_args()
    quiet()
    enable_cpu()
    rows: list[dict[str, Any]] = []
    for recipe in ["tiny"] if options.quick else options.recipe or ["tiny"]:
        chosen = QUICK if options.quick else (f"recipe={recipe}",)
        steps, warmup = (3, 1) if options.quick else (options.steps, options.warmup)
        composed = compose([*chosen, "model.mtp_layers=0", *options.overrides])
        config = resolve_layout(composed, world_size(composed))
        rows += measure(recipe, config, steps, warmup, options.profile, not options.no_baseline)
    if rows[0].pop("rank") == 0:
        for row in rows:
            row.pop("rank", None)
        shown = [{key: value for key, value in row.items() if key != "configuration"} for row in rows]
        report.publish({"rows": rows}, shown, options.json)


def measure(
    recipe: str, config: Config, steps: int, warmup: int, profile: bool, baseline: bool
) -> list[dict[str, Any]]:
    """Rows of one recipe: k3train, and megatron-core with the ratio."""
    from k3train.layout import layout_of
    from k3train.ops.packing import Packing
    from k3train.train.assemble import build_trainer, set_numerics
    from k3train.train.inputs import Inputs
    from k3train.train.step import train_step
    from parallel.groups import destroy, initialize

    set_numerics(config)
    groups = initialize(layout_of(config), device=config.run.device, timeout_minutes=5, seed=1)
    inputs = Inputs(config, groups)
    trainer = build_trainer(config, groups)
    phases: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def phase(name: str, step: int):  # type: ignore[no-untyped-def]
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        if step > warmup:
            phases[name].append(time.perf_counter() - start)

    def batches() -> list[dict[str, Any]]:
        """The next step, each row as one document: the baseline knows no borders."""
        return [
            {**batch, "packing": Packing.single(*batch["tokens"].shape, groups.device)}
            for batch in inputs.next_step()
        ]

    seconds = timed(lambda step: train_step(trainer, batches(), step, phase), steps, warmup)
    rows = [row(recipe, "k3train", config, seconds, groups.rank)]
    rows[0] |= {name: statistics.median(values) for name, values in phases.items()}
    tell(rows[0])
    rows[0]["configuration"] = dataclasses.asdict(config)
    if profile:
        show_profile(lambda: train_step(trainer, batches(), warmup + steps + 1))
    dismantle(trainer.modules)
    trainer = None
    release()
    if baseline:
        from benchmarks.common.plain_megatron import PlainStep

        plain = PlainStep(config, groups)
        others = timed(lambda step: plain(batches()), steps, warmup)
        rows.append(row(recipe, "megatron-core", config, others, groups.rank) | plain.phases())
        rows[1]["parameters"] = plain.description["parameters"]
        tell(rows[1])
        rows[1]["configuration"] = plain.description
        rows[0]["ratio"] = rows[0]["tokens/s"] / rows[1]["tokens/s"]
        rows[1]["ratio"] = 1.0
        dismantle([plain.model])
        del plain
        release()
    inputs.close()
    destroy()
    return rows


def tell(row: dict[str, Any]) -> None:
    """Say at once what a system did: the next one may take minutes, or fail."""
    if row["rank"] == 0:
        shown = " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in row.items()
        )
        print(shown, file=sys.stderr, flush=True)


def row(recipe: str, system: str, config: Config, seconds: list[float], rank: int) -> dict[str, Any]:
    """Figures of one system."""
    import torch

    assert config.parallel.data is not None
    ranks = config.parallel.data * config.parallel.pipeline
    tokens = (
        config.data.sequence_length
        * config.data.micro_batch_size
        * config.run.microbatches
        * config.parallel.data
    )
    median = statistics.median(seconds)
    figures: dict[str, Any] = {
        "rank": rank,
        "recipe": recipe,
        "system": system,
        "tokens/s": tokens / median,
        "ms/step": median * 1e3,
        "fastest": min(seconds) * 1e3,
        "slowest": max(seconds) * 1e3,
    }
    if system == "k3train":
        per_token = flops.train_flops_per_token(config.model, config.data.sequence_length)
        tflops = tokens / median * per_token / ranks / 1e12
        figures |= {"TFLOP/s": tflops, "MFU": tflops / config.cluster.peak_tflops}
        figures["parameters"] = shapes.total(config.model)
    if torch.cuda.is_available():
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def release() -> None:
    """Give a model's memory back before the next one is built."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def show_profile(step: Any) -> None:
    """The operators of one step that cost most on the device."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as profiled:
        step()
        synchronize()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    print(profiled.key_averages().table(sort_by=key, row_limit=22, max_name_column_width=60))


if __name__ == "__main__":
    main()

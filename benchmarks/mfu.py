"""Where the time of a training step goes, by phase, part and operator, each beside its floor; and MFU.

Workload: real text (the running Python's standard library, bytes), every row one document, no MTP, no
checkpointing, no evaluation; a recipe's model, batch and optimizer. Beside it, in the same run, plain
megatron-core of the same shape.

  ms         of a step without tracing (median), shared out as steps under torch.profiler spent it: a kernel
             belongs to the operator that launched it, a backward to the operator that made its node of
             autograd. On a GPU what tracing adds is taken from `idle` (moments without a kernel), on a CPU
             from all alike. Rows sum to the step; `unattributed` is what has no name
  way        forward, backward, or again (run again for a backward)
  floor ms   the larger of FLOPs over the fastest product and bytes over the fastest copy, both measured in
             this run (--ceilings entry: the hardware entry's); FLOPs and bytes of k3train's own lists,
             backward twice forward. A row without a floor is lost as a whole
  waits ms   idle time that ended with a kernel of this operator: what the host was late with
  MFU        model FLOPs over cluster.peak_tflops (BF16 dense). A multiply and an add are two; causal
             attention is halved; what is run again, Newton-Schulz, norms and activations do not count. HFU
             counts what is run again
  routing    router: what the model's own routers choose; balanced, zipf (exponent 1): what all are given

Not equal in plain megatron-core: attention is its MLA in every layer (`--plain gdn`: Gated DeltaNet where K3
has KDA); no AttnRes, output gates, latent norm or MTP; SwiGLU; an auxiliary loss balances its routers. Equal:
layers, widths, vocabulary, experts, top-k, latent and shared experts, tokens, optimizer, clipping. Of several
settings the fastest that fits counts. On a CPU, where its MLA and latent experts do not run, it has plain
attention and experts of full width, as much narrower inside as makes their active FLOPs equal: the ratio
there says nothing. MFU of each divides its own FLOPs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import floor_table, report
from benchmarks.common.attribution import AGAIN, STEP, Attribution, attribute
from benchmarks.common.device import dismantle, synchronize, timed
from benchmarks.common.floors import Ceilings, absent, of_entry, work_of_step
from k3train import flops, shapes
from k3train.config import Config
from k3train.errors import UserError
from k3train.flops import TERA
from k3train.quiet import quiet
from launch.compose import compose, resolve_layout, world_size
from parallel.cpu import enable_cpu
from parallel.topology import LayoutError

QUICK = (
    "recipe=tiny", "parallel=single", "model.num_layers=5", "data.sequence_length=128", "run.microbatches=2",
)  # fmt: skip
RECIPES = {True: ("h200_small", "h200_slice"), False: ("tiny",)}
SHOWN = 30
"""Operators in the printed table; the JSON has all."""


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument(
        "--recipe", action="append", help="may be repeated (h200_small and h200_slice; CPU: tiny)"
    )
    parser.add_argument("--routing", choices=("router", "balanced", "zipf"), default="router")
    parser.add_argument("--ceilings", choices=("measured", "entry"), default="measured")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--traced", type=int, default=2, help="steps under the profiler")
    parser.add_argument(
        "--plain", choices=("mla", "gdn", "none"), default="mla", help="megatron-core's attention"
    )
    parser.add_argument("overrides", nargs="*", help="configuration overrides for all recipes")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.warmup, options.traced = 2, 1, 1
    quiet()
    enable_cpu()
    import torch

    found = []
    for recipe in ["tiny"] if options.quick else options.recipe or RECIPES[torch.cuda.is_available()]:
        try:
            found.append(measure(recipe, _config(recipe, options), options))
        except UserError as error:
            raise SystemExit(f"{recipe}: {error}") from error
        except LayoutError as error:
            raise SystemExit(
                f"{recipe}: {error}; use torchrun --nproc-per-node N, or parallel=single"
            ) from error
        except torch.OutOfMemoryError as error:
            raise SystemExit(
                f"{recipe}: out of memory; fewer tokens (data.sequence_length), layers or experts "
                f"(model.num_experts), or offload.policy=recompute or mixed ({str(error).splitlines()[0]})"
            ) from error
    if found[0].pop("rank") == 0:
        for each in found:
            show(each)
        systems = [system for each in found for system in each["systems"]]
        shown = [{k: v for k, v in row.items() if not isinstance(v, dict | list)} for row in systems]
        report.publish({"benchmark": "mfu", "recipes": found}, shown, options.json)


def _config(recipe: str, options: Any) -> Config:
    import torch

    chosen = QUICK if options.quick else (f"recipe={recipe}",)
    composed = compose([*chosen, "model.mtp_layers=0", *options.overrides])
    if composed.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device=cuda, and torch sees no GPU; --recipe tiny runs on a CPU")
    return resolve_layout(composed, world_size(composed))


def measure(recipe: str, config: Config, options: Any) -> dict[str, Any]:
    """Figures of one recipe: k3train, then megatron-core."""
    from benchmarks.common import ceilings, forced_routing
    from k3train.layout import layout_of
    from k3train.train.assemble import set_numerics
    from parallel.groups import destroy, initialize

    set_numerics(config)
    groups = initialize(layout_of(config), device=config.run.device, timeout_minutes=5, seed=1)
    top, reached = ceilings.measure(config) if options.ceilings == "measured" else (of_entry(config), {})
    choices = forced_routing.prepared(config, options.routing, groups.device)
    with forced_routing.forced(choices):
        found = ours(recipe, config, groups, top, options)
    _release()
    found |= {
        "recipe": recipe,
        "rank": groups.rank,
        "ceilings": {**dataclasses.asdict(top), "reached": reached},
        "routing": {"kind": options.routing, "max over mean": None},
        "configuration": dataclasses.asdict(config),
    }
    if choices:
        found["routing"]["max over mean"] = forced_routing.skew(choices, config.model.num_experts)
    if options.plain != "none":
        found["systems"].append(plain(recipe, config, groups, choices, options))
        _ratios(*found["systems"])
    destroy()
    return found


def ours(recipe: str, config: Config, groups: Any, top: Ceilings, options: Any) -> dict[str, Any]:
    """k3train: timed steps, then traced ones."""
    from benchmarks.common.ranges import phase
    from k3train.train.assemble import build_trainer
    from k3train.train.inputs import Inputs
    from k3train.train.step import train_step

    inputs = Inputs(config, groups)
    trainer = build_trainer(config, groups)

    def step(number: int) -> None:
        with phase("data", number):
            batches = _batches(inputs, groups.device)
        train_step(trainer, batches, number, phase)

    seconds = timed(step, options.steps, options.warmup)
    peak = _peak()
    behind = options.steps + options.warmup + 1
    traced = trace(trainer, step, range(behind, behind + options.traced))
    model_flops = flops.train_flops_per_token(config.model, config.data.sequence_length) * _tokens(config)
    median = statistics.median(seconds)
    entries = floor_table.entries(config, traced, top, median)
    work = work_of_step(config)
    again = sum(each.flops for (*_, way), each in work.items() if way == AGAIN) * _ranks(config)
    floor = sum(top.floor(each) for each in work.values()) + sum(
        entry.floor or 0.0
        for entry in entries
        if entry.label.operator.startswith(("optimizer.", "gradients.zero"))
    )
    system = _system(recipe, "k3train", config, seconds, model_flops, peak) | {
        "HFU": (model_flops + again) / median / _peak_flops(config),
        "floor ms": 1e3 * floor,
        "MFU at floor": model_flops / floor / _peak_flops(config),
        "parameters": shapes.total(config.model),
    }
    rows = floor_table.operators(entries)
    result = {
        "systems": [system],
        "operators": rows,
        "parts": floor_table.parts(entries),
        "phases": floor_table.phases(entries),
        "absent": absent(config, {row["operator"] for row in rows}),
        "below floor": floor_table.impossible(rows),
        "host": floor_table.host(traced),
        "traced over untraced": traced.seconds / traced.steps / median,
    }
    inputs.close()
    dismantle(trainer.modules)
    return result


def trace(trainer: Any, step: Callable[[int], None], numbers: range) -> Attribution:
    """Some steps under the profiler; what they did."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from benchmarks.common.ranges import named_ranges

    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with named_ranges(trainer), profile(activities=activities) as profiled:
        for number in numbers:
            synchronize()
            with record_function(STEP):
                step(number)
                synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        return attribute(json.loads(file.read_bytes())["traceEvents"])


def plain(recipe: str, config: Config, groups: Any, choices: list[Any], options: Any) -> dict[str, Any]:
    """megatron-core: of several settings the fastest that fits and runs."""
    from benchmarks.common.plain_megatron import settings_to_try

    tried: dict[str, Any] = {}
    best: dict[str, Any] | None = None
    for name, changes in settings_to_try(config, groups.device.type == "cuda", options.plain).items():
        try:
            found = _plain_steps(recipe, config, groups, choices, changes, options)
        except Exception as error:  # of another project's option: the next one may run
            tried[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            found["setting"], tried[name] = name, found["ms/step"]
            if best is None or found["tokens/s"] > best["tokens/s"]:
                best = found
        _release()
    if best is None:
        raise SystemExit(f"{recipe}: megatron-core ran with no setting ({tried}); --plain none leaves it out")
    return best | {"tried": tried}


def _plain_steps(
    recipe: str, config: Config, groups: Any, choices: list[Any], changes: dict[str, Any], options: Any
) -> dict[str, Any]:
    from benchmarks.common.forced_routing import force_plain
    from benchmarks.common.plain_megatron import PlainStep
    from k3train.train.inputs import Inputs

    inputs, built = Inputs(config, groups), []
    try:
        model = PlainStep(config, groups, **changes)
        built.append(model.model)
        force_plain(model.model, choices)
        seconds = timed(lambda _: model(_batches(inputs, groups.device)), options.steps, options.warmup)
        total = model.flops_per_token * _tokens(config)
        found = _system(recipe, "megatron-core", config, seconds, total, _peak())
        return found | {"parameters": model.description["parameters"], "configuration": model.description}
    finally:
        inputs.close()
        dismantle(built)


def _batches(inputs: Any, device: Any) -> list[dict[str, Any]]:
    """The next step, each row as one document: the baseline knows no borders."""
    from k3train.ops.packing import Packing

    return [
        {**batch, "packing": Packing.single(*batch["tokens"].shape, device)} for batch in inputs.next_step()
    ]


def _system(
    recipe: str, name: str, config: Config, seconds: list[float], model_flops: float, peak: float | None
) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "recipe": recipe,
        "system": name,
        "tokens/s": _tokens(config) / median,
        "ms/step": median * 1e3,
        "fastest": min(seconds) * 1e3,
        "slowest": max(seconds) * 1e3,
        "TFLOP/s": model_flops / median / _ranks(config) / TERA,
        "MFU": model_flops / median / _peak_flops(config),
        "TFLOP/step": model_flops / TERA,
        "peak GiB": peak,
    }


def _ratios(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Of k3train over megatron-core, in both."""
    for key in ("tokens/s", "MFU"):
        first[f"ratio {key}"], second[f"ratio {key}"] = first[key] / second[key], 1.0


def _ranks(config: Config) -> int:
    parallel = config.parallel
    assert parallel.data is not None
    return parallel.data * parallel.pipeline * parallel.context


def _tokens(config: Config) -> int:
    assert config.parallel.data is not None
    data = config.data
    return data.sequence_length * data.micro_batch_size * config.run.microbatches * config.parallel.data


def _peak_flops(config: Config) -> float:
    """FLOPs a second of all ranks."""
    return config.cluster.peak_tflops * TERA * _ranks(config)


def _peak() -> float | None:
    """GiB that torch had allocated at most on this GPU."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def _release() -> None:
    """Give a model's memory back before the next one is built."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def show(found: dict[str, Any]) -> None:
    """Print what loses time in one recipe."""
    ceilings = found["ceilings"]
    print(
        f"{found['recipe']}: floors from {ceilings['flops'] / TERA:.4g} TFLOP/s and "
        f"{ceilings['bandwidth'] / 1e9:.4g} GB/s, {ceilings['source']}; routing {found['routing']['kind']}; "
        f"traced steps take {found['traced over untraced']:.2f} of untraced ones"
    )
    print(report.table(found["operators"][:SHOWN]))
    if len(found["operators"]) > SHOWN:
        print(f"({len(found['operators']) - SHOWN} rows more in the JSON)")
    for name in ("parts", "phases"):
        print(report.table(found[name]))
    print("absent: " + "; ".join(f"{name} ({why})" for name, why in found["absent"].items()))
    for line in found["below floor"]:
        print(f"below its floor, so that the floor is wrong: {line}")
    print(", ".join(f"{name} {value:,.4g}" for name, value in found["host"].items()))


if __name__ == "__main__":
    main()

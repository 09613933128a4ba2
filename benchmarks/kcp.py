"""KDA over a context group (KCP) beside one rank with whole rows, and beside ranks that swap heads.

Workload: forward and backward of one KDA layer with its projections, one row of T random tokens that is one
document, for each shape: `k3` has K3's hidden width and 96 heads of 128, `h32` 32 heads of 128 at a width of
2304. On CPU 4 heads of 16 at a width of 64. Ways: `one`, every rank the whole row by itself; `kcp`, every
rank its columns; `swap`, every rank its columns, but the state is that of H / N heads of whole rows, with
all-to-alls before and behind. `speedup` and `peak` are over `one` at the same T in this run: time of the
slowest rank, and the most memory of a rank, weights and gradients included. `bytes` are those that a rank
gives to exchanges of states (of heads, with `swap`) in one forward; with kcp they do not depend on T. `error`
is the largest relative norm of the difference to `one`, of the output and of all gradients. A length at which
a way would need more memory than there is, by its own figures at a shorter one, is left out.

`model` is the same with whole optimizer steps of h200_small (on CPU of tiny) without MTP, its layers run
again in backward; its error is that of the first loss.
`largest` doubles T on one rank and on two until a step of h200_small no longer fits, under each policy asked
for.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report
from benchmarks.common.device import synchronize
from benchmarks.common.ranks import run_ranks

RANKS = 2
SHAPES = {"h32": (2304, 32, 128), "k3": (7168, 96, 128), "cpu": (64, 4, 16)}
"""Hidden width, heads, head width."""
LENGTHS = {
    "h32": (32, 64, 128, 256, 512, 1024),
    "k3": (32, 64, 128, 256),
}
QUICK = (256, 512)
WAYS = ("one", "kcp", "swap")
ROOM = 0.92
"""Share of the device's memory that a way may be expected to need."""
TIMEOUT = 900
K = 1024


@dataclass
class Run:
    """What one way took at one length on this rank."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--part", choices=("layer", "model", "largest"), action="append")
    parser.add_argument("--shape", choices=("h32", "k3"), action="append")
    parser.add_argument("--tokens", type=int, action="append", help="T in units of 1024, may be repeated")
    parser.add_argument("--policy", action="append", help="offload.policy of `largest` (recompute, host)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--progress", metavar="FILE", default="", help="append each row as it is measured")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in options.part or ["layer"]:
        rows += PARTS[part](options)
    shown = [{**row, "error": "-" if row.get("error") is None else f"{row['error']:.1e}"} for row in rows]
    report.publish({"benchmark": "kcp", **summary(rows), "rows": rows}, shown, options.json)


def layer_part(options: Any) -> list[dict[str, Any]]:
    """Rows of the layer, on two ranks."""
    shapes = ["cpu"] if options.quick else options.shape or ["h32", "k3"]
    given = [K * count for count in options.tokens or ()]
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        lengths = QUICK if options.quick else given or [K * count for count in LENGTHS[shape]]
        arguments = {
            "shape": shape,
            "lengths": list(lengths),
            "repeats": options.repeats,
            "progress": options.progress,
        }
        rows += run_ranks("benchmarks.kcp:layer_rows", RANKS, arguments, timeout=TIMEOUT)
    return rows


def layer_rows(shape: str, lengths: list[int], repeats: int, progress: str) -> list[dict[str, Any]]:
    """On every rank."""
    import torch

    groups = join(RANKS)
    layer = build_layer(shape, groups)
    rows: list[dict[str, Any]] = []
    peaks: dict[str, tuple[int, int]] = {}
    for length in lengths:
        runs: dict[str, Run] = {}
        for way in WAYS:
            if fits(peaks.get(way), length):
                runs[way] = measure(layer, way, length, repeats, groups)
                peaks[way] = length, runs[way].peak
        for way, run in runs.items():
            rows.append({"part": "layer", "shape": shape, "T": length, **figures(way, run, runs.get("one"))})
            note(rows[-1], progress if groups.rank == 0 else "")
        del runs
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def note(row: dict[str, Any], file: str) -> None:
    """Keep a row, should the run be ended before its table."""
    if file:
        with Path(file).open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def build_layer(shape: str, groups: Any) -> Any:
    """The layer, the same numbers on every rank."""
    import torch
    from megatron.core.transformer.spec_utils import build_module

    from k3train.model.spec import layer_submodules
    from k3train.model.transformer_config import transformer_config
    from launch.compose import compose, resolve_layout

    width, heads, head = SHAPES[shape]
    cuda = torch.cuda.is_available()
    overrides = [
        "recipe=h200_small" if cuda else "recipe=tiny", "parallel=single", "vision=none",
        f"model.hidden_size={width}", f"model.num_heads={heads}", f"model.kda_head_dim={head}",
    ]  # fmt: skip
    config = resolve_layout(compose(overrides), 1)
    spec = layer_submodules(config.model, 0).attention
    layer = build_module(spec, config=transformer_config(config), pg_collection=groups.pg_collection)
    generator = torch.Generator(groups.device).manual_seed(5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            scale = 0.3 if "conv" in name else 0.0 if name == "A_log" else 0.02
            parameter.normal_(0, scale, generator=generator) if scale else parameter.zero_()
        layer.dt_bias.sub_(3)
        layer.o_norm.weight.fill_(1)
    return layer.to(groups.device)


def fits(before: tuple[int, int] | None, length: int) -> bool:
    """Whether memory that grows with the length suffices, from a shorter length's peak."""
    import torch

    if before is None or not torch.cuda.is_available():
        return True
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return before[1] * length / before[0] < ROOM * total


def measure(layer: Any, way: str, length: int, repeats: int, groups: Any) -> Run:
    """Forward and backward on this rank, once to warm up and for the results, then timed."""
    import torch

    from k3train.ops.packing import Packing
    from parallel.context.exchange import even, traffic

    group = groups.pg_collection.cp
    starts = even(length, RANKS)
    share = slice(*starts[group.rank() :][:2])
    packing = Packing.single(1, length, "cpu")
    if way != "one":
        packing = packing.shard(group, starts)
    packing = packing.to(groups.device)
    generator = torch.Generator(groups.device).manual_seed(length)
    x, weight = (random_rows(layer, length, generator, groups.device) for _ in range(2))
    if way != "one":
        x, weight = (rows[share].clone() for rows in (x, weight))
    attend = layer._attend
    if way == "swap":
        layer._attend = partial(swapped, layer)
    run = Run()
    found: dict[str, Any] = {}
    for number in range(repeats + 1):
        traffic.clear()
        with PeakOf(run):
            run.seconds.append(slowest(partial(step, layer, x, weight, packing, found), group))
        run.counted = dict(traffic)
        if number == 0:
            run.results = results(found, layer, share if way == "one" else None, group)
        found.clear()
    layer._attend = attend
    run.seconds = run.seconds[1:]
    return run


def random_rows(layer: Any, length: int, generator: Any, device: Any) -> Any:
    """[s, 1, d] in the model's dtype."""
    import torch

    width, dtype = layer.config.hidden_size, layer.config.params_dtype
    return torch.randn(length, 1, width, generator=generator, device=device, dtype=dtype)


def step(layer: Any, x: Any, weight: Any, packing: Any, found: dict[str, Any]) -> None:
    """One forward and backward, what comes of it to `found`."""
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    output = layer(leaf, packing)
    output.backward(weight)
    found |= {"output": output.detach(), "x": leaf.grad}


class PeakOf:
    """Notes the most memory that is taken inside."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def __exit__(self, *_: object) -> None:
        import torch

        if torch.cuda.is_available():
            self.run.peak = torch.cuda.max_memory_allocated()


def slowest(function: Callable[[], None], group: Any) -> float:
    """Seconds of the rank that needs longest; all start together."""
    import torch
    import torch.distributed as dist

    synchronize()
    dist.barrier(group=group)
    start = time.perf_counter()
    function()
    synchronize()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds = torch.tensor([time.perf_counter() - start], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


def results(found: dict[str, Any], layer: Any, share: slice | None, group: Any) -> dict[str, Any]:
    """On the host: this rank's columns, cut out of whole rows or not, and the gradients of all columns."""
    import torch.distributed as dist

    kept = {name: (rows if share is None else rows[share]).cpu() for name, rows in found.items()}
    for name, parameter in layer.named_parameters():
        total = parameter.grad.float()
        if share is None:
            dist.all_reduce(total, group=group)
        kept[name] = total.cpu()
    return kept


def figures(way: str, run: Run, one: Run | None) -> dict[str, Any]:
    """A row of the table."""
    median = statistics.median(run.seconds)
    name = {"one": None, "kcp": "kda.state", "swap": "kda.swap"}[way]
    return {
        "way": way,
        "ms": median * 1e3,
        "speedup": statistics.median(one.seconds) / median if one else None,
        "peak GB": run.peak / 1e9,
        "peak": run.peak / one.peak if one and one.peak else None,
        "bytes": run.counted[name] if name else 0,
        "halo bytes": run.counted.get("short_conv.halo", 0),
        "error": worst(run, one) if one and run is not one else None,
        "spread": max(run.seconds) / min(run.seconds),
    }


def worst(run: Run, one: Run) -> float:
    """Largest relative norm of a difference to one rank's."""
    errors = []
    for name, value in run.results.items():
        exact = one.results[name].float()
        errors.append(float((value.float() - exact).norm() / exact.norm()))
    return max(errors)


def swapped(layer: Any, packing: Any, *inputs: Any) -> Any:
    """The state's part of the layer on H / N heads of whole rows, for comparison."""
    from k3train.ops.kda import delta_attention

    span = packing.span
    heads = layer.num_heads // span.size
    here = slice(span.rank * heads, (span.rank + 1) * heads)
    whole = [to_heads(x, span) for x in inputs]
    output = delta_attention(
        *whole,
        layer.A_log[here],
        layer.dt_bias.unflatten(0, (layer.num_heads, -1))[here].flatten(),
        lower_bound=layer.config.k3.gate_lower_bound,
        packing=span.whole,
        backend=layer.config.k3.backends.kda,
    )
    return to_columns(output, span)


def to_heads(x: Any, span: Any) -> Any:
    """This rank's columns of all heads [b, s, H, ...] to its heads of all columns [b, S, H / N, ...]."""
    from parallel.context.exchange import exchange_rows

    lengths = [stop - start for start, stop in zip(span.starts[:-1], span.starts[1:], strict=True)]
    own = lengths[span.rank]
    rows = x.transpose(0, 1).unflatten(2, (span.size, -1)).movedim(2, 0).flatten(0, 1)  # [N*s, b, H / N, ...]
    received = exchange_rows(rows.contiguous(), [own] * span.size, lengths, span.group, name="kda.swap")
    return received.transpose(0, 1).contiguous()


def to_columns(x: Any, span: Any) -> Any:
    """The way back."""
    from parallel.context.exchange import exchange_rows

    lengths = [stop - start for start, stop in zip(span.starts[:-1], span.starts[1:], strict=True)]
    own = lengths[span.rank]
    rows = x.transpose(0, 1).contiguous()  # [S, b, H / N, ...]
    received = exchange_rows(rows, lengths, [own] * span.size, span.group, name="kda.swap")
    return received.unflatten(0, (span.size, own)).movedim(0, 2).flatten(2, 3).transpose(0, 1).contiguous()


def model_part(options: Any) -> list[dict[str, Any]]:
    """Whole steps of h200_small: one rank, then two."""
    given = [K * count for count in options.tokens or (32, 64, 128, 256)]
    lengths = list(QUICK) if options.quick else given
    rows: list[dict[str, Any]] = []
    for ranks in (1, RANKS):
        arguments = {
            "ranks": ranks,
            "lengths": lengths,
            "repeats": options.repeats,
            "policy": "recompute",
            "progress": options.progress,
        }
        rows += run_ranks("benchmarks.kcp:model_rows", ranks, arguments, timeout=TIMEOUT)
    alone = {row["T"]: row for row in rows if row["way"] == "one"}
    for row in rows:
        if one := alone.get(row["T"]):
            row["speedup"] = one["ms"] / row["ms"]
            row["peak"] = row["peak GB"] / one["peak GB"] if one["peak GB"] else None
            row["error"] = abs(row["loss"] - one["loss"]) / one["loss"]
    return rows


def model_rows(
    ranks: int, lengths: list[int], repeats: int, policy: str, progress: str
) -> list[dict[str, Any]]:
    """On every rank: the lengths in turn, each with a trainer of its own, as far as memory goes."""
    import gc

    import torch

    groups = join(ranks)
    rows, before = [], None
    for length in lengths:
        if not fits(before, length):
            break
        row = model_row(groups, length, repeats, policy)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        before = length, int(row["peak GB"] * 1e9)
        rows.append(row)
        note(row, progress if groups.rank == 0 else "")
    return rows


def join(ranks: int) -> Any:
    """The groups of ranks that share rows."""
    from parallel.groups import initialize
    from parallel.topology import Topology

    return initialize(Topology(context=ranks), timeout_minutes=5, seed=1)


def model_row(groups: Any, length: int, repeats: int, policy: str) -> dict[str, Any]:
    """Optimizer steps on one row of random tokens; the loss is the first step's."""
    import torch

    from benchmarks.common.device import dismantle
    from k3train.train.assemble import build_trainer, set_numerics
    from k3train.train.step import train_step
    from launch.compose import compose, resolve_layout
    from parallel.context.exchange import traffic

    ranks = groups.topology.world_size
    recipe = "h200_small" if torch.cuda.is_available() else "tiny"
    overrides = [
        f"recipe={recipe}", "parallel=single", "vision=none", "data.images=[]", "model.mtp_layers=0",
        f"parallel.context={ranks}", f"offload.policy={policy}",
        f"data.sequence_length={length}", "data.micro_batch_size=1", "run.microbatches=1",
    ]  # fmt: skip
    config = resolve_layout(compose(overrides), ranks)
    set_numerics(config)
    trainer = build_trainer(config, groups)
    batch = random_batch(config, groups)
    run = Run()
    losses = []
    for number in range(1, repeats + 2):
        traffic.clear()
        with PeakOf(run):
            one_step = partial(lambda n: losses.append(train_step(trainer, [batch], n).losses.loss), number)
            run.seconds.append(slowest(one_step, groups.pg_collection.cp))
    dismantle(trainer.modules)
    run.seconds = run.seconds[1:]
    return {
        "part": "model", "shape": recipe, "T": length, "way": "one" if ranks == 1 else "kcp",
        "ms": statistics.median(run.seconds) * 1e3, "peak GB": run.peak / 1e9,
        "bytes": traffic["kda.state"], "loss": losses[0],
    }  # fmt: skip


def random_batch(config: Any, groups: Any) -> dict[str, Any]:
    """One row of one document, this rank's columns of it."""
    import torch

    from k3train.ops.packing import Packing
    from k3train.train.inputs import columns
    from parallel.context.exchange import even

    length, group = config.data.sequence_length, groups.pg_collection.cp
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(config.model.vocab_size, (1, length + 1), generator=generator)
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, length),
        "sample_ids": torch.zeros(1, dtype=torch.long),
    }
    packing = Packing.single(1, length, "cpu")
    if group.size() > 1:
        packing = packing.shard(group, even(length, group.size()))
        batch = columns(batch, packing)
    placed: dict[str, Any] = {name: value.to(groups.device) for name, value in batch.items()}
    return placed | {"packing": packing.to(groups.device)}


def largest_part(options: Any) -> list[dict[str, Any]]:
    """The longest row of which h200_small makes a step, on one rank and on two, under each policy."""
    rows = []
    for policy in options.policy or ("recompute", "host"):
        for ranks in (1, RANKS):
            found = 0
            for count in options.tokens or (128, 256, 512, 1024, 2048):
                arguments = {"ranks": ranks, "lengths": [K * count], "repeats": 0, "policy": policy}
                try:
                    run_ranks("benchmarks.kcp:one_step", ranks, arguments, timeout=TIMEOUT)
                except SystemExit:
                    break
                found = K * count
            rows.append({"part": "largest", "shape": "h200_small", "T": found, "way": f"{ranks}, {policy}"})
    return rows


def one_step(ranks: int, lengths: list[int], repeats: int, policy: str) -> list[int]:
    """One optimizer step at each length; fails where it does not fit."""
    groups = join(ranks)
    for length in lengths:
        model_row(groups, length, max(repeats, 1), policy)
    return lengths


PARTS = {"layer": layer_part, "model": model_part, "largest": largest_part}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures by shape and length."""
    kcp = [row for row in rows if row["way"] == "kcp"]

    def by_length(key: str) -> dict[str, dict[int, Any]]:
        found: dict[str, dict[int, Any]] = {}
        for row in kcp:
            found.setdefault(row["shape"], {})[row["T"]] = row.get(key)
        return found

    errors = [row["error"] for row in kcp if row.get("error") is not None]
    return {
        "speedup": by_length("speedup"),
        "peak_ratio": by_length("peak"),
        "payload_bytes": by_length("bytes"),
        "max_error_vs_one_rank": max(errors, default=None),
        "largest": {row["way"]: row["T"] for row in rows if row["part"] == "largest"},
    }


if __name__ == "__main__":
    main()

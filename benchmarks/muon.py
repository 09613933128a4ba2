"""What AdamW, Muon on whole matrices and Per-Head Muon take of a training step, at Kimi K3's shard shapes.

Workload: what one rank updates in the layout of recipe=k3_pretrain (1,024 ranks: 8 pipeline ranks, 128 data
ranks, 128 expert ranks): all its routed experts, and of the dense matrices of its stage the blocks that the
busiest rank owns; with --dense, all of six layers. FP32 master weights, gradients and states; Newton-Schulz
in BF16. AdamW updates as many elements, in torch's fused form. There is one GPU: the exchange of the ranks is
planned, not run. With --quick, all of a small model on the CPU.

`share_of_step` is the optimizer's time over its sum with forward and backward of the same rank in the same
step. These are measured on h200_slice in this run, for each token and layer, and scaled to the rank's 12
layers and 128 micro-batches of 4,096 tokens, without bubbles and communication; or --forward-backward says.
Times are milliseconds, medians with the fastest and slowest.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import report
from benchmarks.train_step import QUICK, measure, release, timed
from k3train.config import Config, ModelConfig
from k3train.layout import layout_of
from k3train.memory import stage_of
from k3train.optim.groups import Split, newton_schulz_flops, split
from k3train.optim.layout import Rule, muon_traffic, owned_blocks
from k3train.optim.owners import Span, cut, exchange
from k3train.optim.per_head import Matrix, PerHeadMuon, Settings
from k3train.quiet import quiet
from k3train.schedule import layer_cuts
from k3train.shapes import Parameter, compact_parameters
from launch.compose import compose, resolve_layout
from parallel.cpu import enable_cpu

RANKS, STAGE = 1024, 1
"""Ranks of recipe=k3_pretrain, and a pipeline rank with neither embedding nor head."""
Shapes = dict[tuple[int, int], int]
"""How many blocks of each shape."""


@dataclass(frozen=True)
class Work:
    """What a rank updates and for which share of a step's forward and backward."""

    config: Config
    chunks: list[list[Parameter]]
    layers: int
    tokens: int
    """Of a step, in each of its layers."""


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--forward-backward", type=float, metavar="S", help="seconds of a token in a layer, not measured here"
    )
    parser.add_argument(
        "--dense",
        action="store_true",
        help="all dense matrices of the stage's first chunk instead",
    )
    options = parser.parse_args()
    quiet()
    enable_cpu()
    torch.set_num_threads(1)
    work = quick_work() if options.quick else dense_work() if options.dense else k3_work()
    times = {name: run(name, work, options.repeats) for name in RULES}
    traffic = muon_traffic(work.config, topology_of(work), work.chunks, first=False)
    for name, seconds in times.items():
        print(f"{name}: {[round(1e3 * each, 2) for each in seconds]} ms", file=sys.stderr, flush=True)
    token = options.forward_backward or token_seconds(options.quick)
    step = token * work.layers * work.tokens
    rows = [row(name, work, seconds, step) for name, seconds in times.items()]
    figures = {
        "share_of_step": {each["optimizer"]: each["share of step"] for each in rows},
        "forward_backward_seconds": step,
        "token_layer_microseconds": 1e6 * token,
        "tokens": work.tokens,
        "layers": work.layers,
        "sent_bytes": traffic,
        "rows": rows,
    }
    report.publish(figures, rows, options.json)


def k3_work() -> Work:
    """A middle stage of Kimi K3."""
    config = resolve_layout(compose(["recipe=k3_pretrain", "optim=muon_per_head"]), RANKS)
    topology = layout_of(config, RANKS)
    cuts = layer_cuts(config, topology)
    stages = [topology.pipeline * chunk + STAGE for chunk in range(topology.virtual)]
    entries = list(compact_parameters(config.model))
    chunks = [[entry for entry in entries if stage_of(entry, cuts) == stage] for stage in stages]
    tokens = config.run.microbatches * config.data.micro_batch_size * config.data.sequence_length
    return Work(config, chunks, sum(len(cuts[stage]) for stage in stages), tokens)


def dense_work() -> Work:
    """Where heads matter: the dense matrices of six layers, as without data parallelism."""
    work = k3_work()
    config = resolve_layout(compose(["recipe=k3_pretrain", "optim=muon_per_head", "parallel=single"]), 1)
    dense = [entry for entry in work.chunks[0] if entry.kind != "expert"]
    return Work(config, [dense], work.layers // 2, work.tokens)


def quick_work() -> Work:
    """All of a small model."""
    config = resolve_layout(compose([*QUICK, "optim=muon_per_head"]), 1)
    tokens = config.run.microbatches * config.data.micro_batch_size * config.data.sequence_length
    return Work(config, [list(compact_parameters(config.model))], config.model.num_layers, tokens)


def topology_of(work: Work) -> Any:
    parallel = work.config.parallel
    return layout_of(work.config, parallel.pipeline * (parallel.data or 1))


def whole(entry: Parameter, model: ModelConfig) -> Split | None:
    """Muon as it was: each matrix as it is stored."""
    return None if split(entry, model) is None else Split("whole", (entry.shape[0],))


RULES: dict[str, Rule | None] = {"adamw": None, "muon": whole, "muon_per_head": split}


def shapes(work: Work, rule: Rule) -> Shapes:
    """Blocks that the busiest rank owns."""
    found: Counter[tuple[int, int]] = Counter()
    for expert in (False, True):
        by_rank: dict[int, Counter[tuple[int, int]]] = {}
        owned = owned_blocks(
            work.config, topology_of(work), work.chunks, first=False, expert=expert, rule=rule
        )
        for blocks, owners in owned:
            for block, owner in zip(blocks, owners, strict=True):
                by_rank.setdefault(owner, Counter())[block.shape] += 1
        if by_rank:
            found += max(by_rank.values(), key=lambda counted: flops(dict(counted), work))
    return dict(found)


def flops(found: Shapes, work: Work) -> float:
    """Of Newton-Schulz on all of them."""
    steps = work.config.optim.muon_steps
    return sum(count * newton_schulz_flops(shape, steps) for shape, count in found.items())


def run(name: str, work: Work, repeats: int) -> list[float]:
    """Seconds of each update."""
    rule = RULES[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = shapes(work, rule or split)
    tensors = [
        torch.nn.Parameter(torch.randn(rows * each, columns, device=device))
        for (rows, columns), count in found.items()
        for each in _portions(count, rows * columns)
    ]
    heights = [
        (rows, each) for (rows, columns), count in found.items() for each in _portions(count, rows * columns)
    ]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    step = _adamw(work.config, tensors) if rule is None else _muon(work.config, tensors, heights, device)
    seconds = timed(step, repeats, 1)
    del step, tensors
    release()
    return seconds


def _portions(count: int, size: int) -> list[int]:
    """Blocks in each tensor: matrices have at most 2^27 elements."""
    most = max(1, (1 << 27) // size)
    return [most] * (count // most) + ([count % most] if count % most else [])


def _adamw(config: Config, tensors: list[torch.nn.Parameter]) -> Callable[[int], None]:
    optim = config.optim
    optimizer = torch.optim.AdamW(
        tensors, lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay, fused=True
    )
    return lambda number: optimizer.step()


def _muon(
    config: Config, tensors: list[torch.nn.Parameter], heights: list[tuple[int, int]], device: torch.device
) -> Callable[[int], None]:
    optim = config.optim
    blocks = [
        block
        for number, (tensor, (rows, count)) in enumerate(zip(tensors, heights, strict=True))
        for block in cut(
            number, Split("", (rows,), count).blocks(tensor.shape[1]), [Span(0, 0, tensor.numel())]
        )
    ]
    matrices = [Matrix("", (each.shape[0], each.shape[1]), each) for each in tensors]
    optimizer = PerHeadMuon(
        [{"params": tensors, "lr": optim.lr, "weight_decay": optim.weight_decay}],
        matrices,
        [exchange(blocks, [0] * len(blocks), 0, 1)],
        Settings(optim.muon_momentum, optim.muon_steps, (optim.beta1, optim.beta2), optim.eps),
        device,
    )
    return lambda number: optimizer.step()


def token_seconds(small: bool) -> float:
    """Forward and backward of one token in one layer."""
    chosen = [*QUICK, "optim=muon_per_head"] if small else SLICE
    config = resolve_layout(compose([*chosen, "model.mtp_layers=0"]), 1)
    (figures,) = measure(config.recipe, config, 2, 1, False, False)
    tokens = config.run.microbatches * config.data.micro_batch_size * config.data.sequence_length
    return figures["forward_backward"] / tokens / config.model.num_layers


SLICE = ["recipe=h200_slice", "optim=muon_per_head", "run.microbatches=2"]


def row(name: str, work: Work, seconds: list[float], step: float) -> dict[str, Any]:
    """Figures of one optimizer."""
    rule = RULES[name]
    median = statistics.median(seconds)
    found = shapes(work, rule or split)
    newton_schulz = 0.0 if rule is None else flops(found, work)
    return {
        "optimizer": name,
        "ms": 1e3 * median,
        "fastest": 1e3 * min(seconds),
        "slowest": 1e3 * max(seconds),
        "parameters M": sum(rows * columns * count for (rows, columns), count in found.items()) / 1e6,
        "blocks": sum(found.values()),
        "TFLOP": newton_schulz / 1e12,
        "TFLOP/s": newton_schulz / median / 1e12,
        "share of step": median / (median + step),
    }


if __name__ == "__main__":
    main()

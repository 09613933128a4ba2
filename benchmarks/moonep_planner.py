"""How evenly, how fast and with how many replicas the expert planner and other policies spread the rows.

Workload: E=896 experts, K=16 choices of each token, S=8192 tokens on each of R ranks (--quick: fewer).
Choices are made up from a popularity of experts that all ranks share, lognormal:SIGMA or zipf:EXPONENT in a
random order of experts. `fill` is MoonEP's policy; `eplb` copies the busiest experts of an earlier step into
two slots of a rank, and `eplb, moved homes` packs all experts anew, which is no plan here: only its balance
is given. The earlier step has the same popularity, or (`drifted`) one that differs by a log-normal factor
of sigma 0.5. `none` is plain expert parallelism.

Columns: rows of the busiest rank over the mean, padding left out; replicas on the rank with most, and of all;
rows computed away from home, and padding, as shares of all rows; `alloc ms` counts to allocation, `tables ms`
counts to a plan without rows, `plan ms` counts to a whole plan of one rank. On a GPU these replay a CUDA
graph where the policy can be captured (`fill`); `eager ms` is the whole plan with its launches, as it is
called. Gathering the counts is not part of it.

A recorded trace replaces the made-up choices: `--trace FILE`, one JSON object a line,

    {"layer": 3, "step": 120, "counts": [[5, 0, ...], ...]}

where counts[r][e] are the entries that source rank r routed to logical expert e, K of each token. Experts are
dealt to the ranks as at initialisation, or blockwise with --blockwise. With --ranks R, the sources of one
layer's lines are taken together, in their order, R at a time, so that micro-batches of a run on few ranks
stand for ranks. `eplb` has then seen the layer's lines before, and re-places after every `--every` of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import report, routing
from parallel.moonep.plan import FILL, NONE, Eplb, Plan, Policy, backends, place, plan
from parallel.moonep.plan.types import at_home

EXPERTS, TOP_K, TOKENS = 896, 16, 8192
RANKS = (8, 16, 32, 64)
KINDS = ("lognormal:0.1", "lognormal:1", "lognormal:5", "zipf:1.0")
DRIFT = 0.5
PAD = 16


@dataclass
class Load:
    """A step to plan for: counts [R, E], rank 0's choice [S, K], and earlier counts by how they relate."""

    name: str
    counts: Tensor
    choice: Tensor
    history: dict[str, list[Tensor]]


def made_up(kind: str, ranks: int, tokens: int) -> Load:
    """A step of full size, and one before it of the same popularity and of a drifted one."""
    popular = routing.popularity(kind, EXPERTS, seed=1)
    drift = routing.popularity(f"lognormal:{DRIFT}", EXPERTS, seed=2)
    counts, choice = routing.gathered(popular, ranks, tokens, TOP_K, seed=3)
    before, _ = routing.gathered(popular, ranks, tokens, TOP_K, seed=4)
    drifted = popular * drift / (popular * drift).sum()
    other, _ = routing.gathered(drifted, ranks, tokens, TOP_K, seed=5)
    return Load(kind, counts, choice, {"": [before], ", drifted": [other]})


def traced(file: Path, ranks: int | None, *, blockwise: bool) -> Iterator[Load]:
    """The steps of a trace, one after the other for each layer."""
    for layer, matrices in routing.recorded(file).items():
        sources = [row for matrix in matrices for row in matrix]
        size, experts = ranks or len(matrices[0]), len(sources[0])
        if experts % size:
            raise SystemExit(f"--ranks {size}: must divide the {experts} experts of {file}")
        if len(sources) < size:
            raise SystemExit(f"--ranks {size}: at most {len(sources)}, the sources of a layer in {file}")
        steps = [torch.tensor(sources[at : at + size]) for at in range(0, len(sources) - size + 1, size)]
        physical = (place.blockwise if blockwise else place.dealt)(experts, size)
        logical = place.inverse(physical)
        steps = [step[:, logical].int() for step in steps]
        for at, counts in enumerate(steps):
            yield Load(f"layer {layer} step {at}", counts, _entries(counts[0]), {"": steps[:at]})


def _entries(counts: Tensor) -> Tensor:
    """[E] to [N, 1]: entries in some order, since a trace does not keep it."""
    entries = torch.arange(len(counts)).repeat_interleave(counts.long())
    return entries[torch.randperm(len(entries), generator=torch.Generator().manual_seed(0))][:, None]


def policies(load: Load, every: int) -> Iterator[tuple[str, Policy]]:
    """Each policy under the name of its row; stateful ones have seen the history."""
    yield "fill", FILL
    yield "none", NONE
    for how, history in load.history.items():
        for name, move in (("eplb", False), ("eplb, moved homes", True)):
            policy = Eplb(every=every, move_homes=move)
            for counts in history:
                policy.observe(counts)
            yield name + how, policy


def row_of(load: Load, name: str, policy: Policy, backend: str, repeats: int) -> dict[str, Any]:
    """Figures of one policy through one backend."""
    counts, choice = load.counts.to(DEVICE), load.choice.to(DEVICE)
    chosen = backends.resolve(backend, DEVICE, *_sizes(counts), choice.shape[1])
    captured = policy.balanced and DEVICE == "cuda"
    clock = graph_ms if captured else eager_ms
    alloc = policy(counts, chosen)
    row = {
        "workload": load.name,
        "R": len(counts),
        "policy": name,
        "backend": backend,
        **spread(alloc),
        "alloc ms": clock(lambda: policy(counts, chosen), repeats),
    }
    if isinstance(policy, Eplb) and policy.move_homes:
        return row
    total = int(load.counts.sum())

    def make(choice: Tensor) -> Plan:
        return plan(counts, choice, 0, pad=PAD, policy=policy, backend=backend, total_rows=total)

    return row | {
        "padding": int(make(choice).ends[:, -1].sum()) / total - 1,
        "tables ms": clock(lambda: make(choice[:0]), repeats),
        "plan ms": clock(lambda: make(choice), repeats),
        "eager ms": eager_ms(lambda: make(choice), repeats),
    }


def spread(alloc: Tensor) -> dict[str, Any]:
    """How evenly an allocation [R, E] spreads its rows, and by how many replicas."""
    rows, own = alloc.sum(1).double(), at_home(alloc)
    replicas = (alloc > 0).sum(1) - (own > 0).sum(1)
    return {
        "max_over_mean": (rows.max() / rows.mean()).item(),
        "replicas_max": int(replicas.max()),
        "replicas": int(replicas.sum()),
        "moved": 1 - int(own.sum()) / int(alloc.sum()),
    }


def _sizes(counts: Tensor) -> tuple[int, int]:
    return counts.shape[0], counts.shape[1] // counts.shape[0]


def eager_ms(function: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, device work included."""
    found = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found[2:])


def graph_ms(function: Callable[[], object], repeats: int) -> float:
    """Mean milliseconds of a captured call, one replay behind the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats * 10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / (repeats * 10)


def usable(load: Load) -> list[str]:
    """Backends that plan this here, fastest first; the reference only where its rows do not take seconds."""
    ranks, places = _sizes(load.counts)
    found = []
    for name in backends.NAMES:
        if name == "reference" and DEVICE == "cuda":
            continue
        try:
            backends.resolve(name, DEVICE, ranks, places, load.choice.shape[1])
        except backends.BackendError:
            continue
        found.append(name)
    return found


def measure(load: Load, repeats: int, every: int) -> list[dict[str, Any]]:
    """Rows of one step: `fill` through each backend, the others through the fastest."""
    names = usable(load)
    return [
        row_of(load, name, policy, backend, 3 if backend == "reference" else repeats)
        for name, policy in policies(load, every)
        for backend in (names if name == "fill" else names[:1])
    ]


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of `fill` through the fastest backend, over all loads."""
    backend = rows[0]["backend"]
    ours = [row for row in rows if row["policy"] == "fill" and row["backend"] == backend]
    return {
        "backend": backend,
        "max_over_mean": max(row["max_over_mean"] for row in ours),
        "plan_ms": max(row["plan ms"] for row in ours),
        "replicas_max": max(row["replicas_max"] for row in ours),
    }


def arguments() -> argparse.Namespace:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--ranks", type=int, action="append", help="R, may be repeated (8, 16, 32, 64)")
    parser.add_argument("--tokens", type=int, help="S (8192, quick 512)")
    parser.add_argument("--repeats", type=int, help="of each measurement (20, quick 3)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay recorded counts")
    parser.add_argument("--blockwise", action="store_true", help="with --trace: experts are not dealt")
    parser.add_argument("--every", type=int, default=1, help="with --trace: steps between placements of eplb")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    repeats = options.repeats or (3 if options.quick else 20)
    if options.trace:
        sizes = options.ranks or [None]
        loads = [each for size in sizes for each in traced(options.trace, size, blockwise=options.blockwise)]
        workload: dict[str, Any] = {"trace": options.trace.name, "steps": len(loads)}
    else:
        tokens = options.tokens or (512 if options.quick else TOKENS)
        ranks = options.ranks or ([8, 64] if options.quick else list(RANKS))
        loads = [made_up(kind, size, tokens) for kind in KINDS for size in ranks]
        workload = {"experts": EXPERTS, "top_k": TOP_K, "tokens": tokens, "ranks": ranks, "pad": PAD}
    rows = [row for load in loads for row in measure(load, repeats, options.every)]
    top = {"benchmark": "moonep_planner", **headline(rows), "workload": workload}
    report.publish({**top, "rows": rows}, rows, options.json)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()

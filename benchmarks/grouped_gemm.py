"""Grouped GEMMs of routed experts: every backend beside the choice of the cost model, forward and gradients.

Workload: experts of K3's shapes (56 experts, 3584 -> 6144 and 3072 -> 3584) and of the `small` model (64
experts, 512 -> 896 and 448 -> 512), 16,384 and 65,536 rows in BF16; rows of an expert balanced, or drawn from
Zipf's law with exponent 0.5, 1 and 1.5 in a random order. Weights lie in one storage (`joint`) or are tensors
of their own (`separate`, which torch's grouped product has to copy first). On a CPU, and with --quick,
everything is small.

A time is the sum of the three products x W^T, g W and g^T x, each the median of calls in a row on inputs that
take turns, by the device's clock; the backends take turns too. `choice` includes the time to choose, which
`selection_us` gives alone. `worst_over_best` is the largest ratio of the choice to the best single backend
(goal 1.05), `mean_gain` the geometric mean of each fixed backend's time over the choice's (goal above 1).

--calibrate FILE measures other loads and shapes as well and puts the coefficients of this machine into FILE,
k3train/ops/grouped/coefficients.json or one like it; --json then keeps what was measured.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from itertools import product as pairs
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import report
from benchmarks.common.grouped_fit import Sample, fit, put, quality
from k3train.ops import backends, grouped
from k3train.ops.grouped import cost, grouped_mm
from k3train.ops.grouped.segments import Products, Segments

K3 = ((56, 3584, 6144), (56, 3072, 3584))
SMALL = ((64, 512, 896), (64, 448, 512))
OTHERS = ((32, 2048, 2048), (16, 1024, 3072), (112, 1024, 1024))
TOY = ((8, 64, 96), (8, 48, 64))
SETS = 3
"""Sets of inputs that take turns."""


@dataclass(frozen=True)
class Case:
    """One load of one shape; `skew` is Zipf's exponent, 0 for balanced; counts are rounded up to `pad`."""

    groups: int
    inputs: int
    outputs: int
    rows: int
    skew: float
    joint: bool
    pad: int = 1
    empty: bool = False
    """Whether the last half of the groups has no rows, like slots that no expert was copied to."""

    def counts(self, seed: int) -> list[int]:
        """Rows of each group."""
        random = np.random.default_rng([seed, self.groups, self.inputs, self.rows, int(10 * self.skew)])
        filled = self.groups // 2 if self.empty else self.groups
        if self.skew:
            shares = random.permutation((np.arange(filled) + 1.0) ** -self.skew)
            counts = random.multinomial(self.rows, shares / shares.sum()).tolist()
        else:
            counts = [self.rows // filled + (group < self.rows % filled) for group in range(filled)]
        return [-(-count // self.pad) * self.pad for count in counts] + [0] * (self.groups - filled)


class Inputs:
    """Rows, gradients and weights of a case, in sets that take turns."""

    def __init__(self, case: Case, counts: list[int], device: str) -> None:
        self.segments = Segments.of(counts, device)
        n, shape = sum(counts), (case.groups, case.outputs, case.inputs)
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.rows = [make(n, case.inputs) for _ in range(SETS)]
        self.grads = [make(n, case.outputs) for _ in range(SETS)]
        self.weights: list[list[Tensor]] = []
        for _ in range(SETS):
            stack = make(shape)
            self.weights.append(list(stack) if case.joint else [weight.clone() for weight in stack])

    def operands(self, product: str, turn: int) -> tuple[Any, ...]:
        """The first three arguments of a product."""
        rows, grads, weights = (x[turn % SETS] for x in (self.rows, self.grads, self.weights))
        if product == "weight_gradients":
            return grads, rows, self.segments
        return rows if product == "multiply" else grads, weights, self.segments

    def layer(self, backend: str, turn: int) -> None:
        """The three products through the public door, for counts that were not seen before."""
        self.segments = Segments(self.segments.counts, self.segments.ends)
        for product in cost.PRODUCTS:
            getattr(grouped, product)(*self.operands(product, turn), backend=backend)

    def run_variant(self, product: str, variant: str, kernels: Products, turn: int) -> None:
        """One product of a backend in a given order of groups."""
        order = self.segments.order(variant.endswith(cost.LARGEST_FIRST))
        getattr(kernels, product)(*self.operands(product, turn), order)


def calls(function: Callable[[int], None], repeats: int, device: str) -> list[float]:
    """Milliseconds of each of `repeats` calls in a row, behind one that warms up."""
    function(0)
    synchronize(device)
    if device == "cpu":
        stamps = [time.perf_counter()]
        for turn in range(repeats):
            function(turn)
            stamps.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(stamps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for turn in range(repeats):
        function(turn)
        events[turn + 1].record()
    synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def host_milliseconds(function: Callable[[int], None], repeats: int, device: str) -> float:
    """Median time until a call on an idle device returns to the host."""
    times = []
    for turn in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function(turn)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def cases(quick: bool) -> list[Case]:
    """What is compared."""
    shapes, rows = (TOY, (512,)) if quick else (K3 + SMALL, (16_384, 65_536))
    return [
        Case(*shape, n, skew, joint)
        for shape, n, joint, skew in pairs(shapes, rows, (True, False), (0.0, 0.5, 1.0, 1.5))
    ]


def calibration_cases(quick: bool) -> list[Case]:
    """Loads around those that are compared, padded and with empty groups too."""
    shapes, rows = (TOY, (256, 512)) if quick else (K3 + SMALL + OTHERS, (4_096, 16_384, 32_768, 65_536))
    found = [
        Case(*shape, n, skew, joint=True) for shape, n, skew in pairs(shapes, rows, (0.0, 0.5, 1.0, 1.5))
    ]
    found += [Case(*s, n, 0.8, joint=True, pad=pad) for s, n, pad in pairs(shapes, rows, (8, 128))]
    found += [Case(*s, n, skew, joint=False) for s, n, skew in pairs(shapes, rows[-2:], (0.0, 1.0))]
    return found + [Case(*s, n, 0.6, joint=True, empty=True) for s, n in pairs(shapes, rows)]


def compare(case: Case, seed: int, rounds: int, device: str) -> dict[str, Any]:
    """Milliseconds of each single backend and of the choice, all three products."""
    inputs = Inputs(case, case.counts(seed), device)
    names = [b.name for b in backends.usable("grouped", device, torch.bfloat16)]
    times: dict[str, list[float]] = {name: [] for name in [*names, "auto"]}
    for turn in range(rounds):
        for name in np.roll(list(times), turn).tolist():
            times[name] += calls(partial(inputs.layer, name), 4, device)
    sums = {name: statistics.median(values) for name, values in times.items()}
    best = min(names, key=sums.__getitem__)
    return {
        "shape": f"{case.groups} x {case.inputs} -> {case.outputs}",
        "rows": case.rows,
        "weights": "joint" if case.joint else "separate",
        "load": f"zipf {case.skew}" if case.skew else "balanced",
        **{f"{name} ms": sums[name] for name in names},
        "choice ms": sums["auto"],
        "best": best,
        "choice/best": sums["auto"] / sums[best],
        "chosen": chosen(inputs, device),
        "spread ms": {name: [min(values), max(values)] for name, values in times.items()},
    }


def chosen(inputs: Inputs, device: str) -> str:
    """What the cost model takes for the three products."""
    if device == "cpu":
        return "loop"
    model = cost.model_for(torch.cuda.get_device_name())
    names = tuple(b.name for b in backends.usable("grouped", device, torch.bfloat16))
    o, i = inputs.weights[0][0].shape
    copies = grouped_mm.copied(inputs.weights[0], inputs.segments)
    found = []
    for product in cost.PRODUCTS:
        n = 0 if product == "weight_gradients" else copies
        choice = cost.choose(model, product, inputs.segments.load, i, o, n, names)
        found.append(choice.backend + ("*" if choice.largest_first else ""))
    return " ".join(found)


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The two headline ratios."""
    names = [key.removesuffix(" ms") for key in rows[0] if key.endswith(" ms")]
    names = [name for name in names if name not in ("choice", "spread")]
    gains = {
        name: math.exp(statistics.fmean(math.log(row[f"{name} ms"] / row["choice ms"]) for row in rows))
        for name in names
    }
    return {"worst_over_best": max(row["choice/best"] for row in rows), "mean_gain": gains}


def variants(device: str) -> Iterator[tuple[str, Products]]:
    """Backends that run here, and their other order of groups where they have one."""
    for backend in backends.usable("grouped", device, torch.bfloat16):
        kernels = backend.load()()
        yield backend.name, kernels
        if backend.name != "grouped_mm":
            yield backend.name + cost.LARGEST_FIRST, kernels


def measure(case: Case, turn: int, seed: int, device: str) -> Iterator[Sample]:
    """Every variant of every product of a case; of weights apart, only what has to copy them.

    `turn` says which variant goes first, when the device is coolest.
    """
    counts = case.counts(seed)
    inputs = Inputs(case, counts, device)
    copies = grouped_mm.copied(inputs.weights[0], inputs.segments)
    found = list(variants(device))
    turn %= len(found)
    for product, (variant, kernels) in pairs(cost.PRODUCTS, found[turn:] + found[:turn]):
        copied = copies if variant == "grouped_mm" and product != "weight_gradients" else 0
        if not case.joint and not copied:
            continue
        run = partial(inputs.run_variant, product, variant, kernels)
        total = 1e3 * statistics.median(calls(run, 7, device))
        host = 1e3 * host_milliseconds(run, 3, device)
        yield Sample(variant, product, tuple(counts), case.inputs, case.outputs, copied, total, host)


def measured(seed: int, quick: bool, device: str) -> dict[str, Any]:
    """Samples of all loads, with the machine they belong to."""
    cases = enumerate(calibration_cases(quick))
    samples = [vars(sample) for turn, case in cases for sample in measure(case, turn, seed, device)]
    many = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 1
    return {"machine": report.machine(), "multiprocessors": many, "samples": samples}


def calibrate(raw: dict[str, Any], file: Path) -> None:
    """Fit the coefficients to what was measured, put them into `file`, show how well they fit."""
    samples = [Sample(**{**sample, "counts": tuple(sample["counts"])}) for sample in raw["samples"]]
    found = fit(samples, raw["machine"], raw["multiprocessors"])
    put(found, file)
    print("expected over measured time")
    print(report.table(quality(found, samples)))


def selection_us(device: str) -> dict[str, float]:
    """Microseconds to choose for a load not seen before, and for a known one (grouped_mm could run)."""
    if device == "cpu":
        return {}
    model, names = cost.model_for(torch.cuda.get_device_name()), ("te", "grouped_mm", "loop")
    times: dict[str, list[float]] = {"new": [], "known": []}
    for seed in range(200):
        counts = Case(*K3[0], 16_384, 0.7, joint=True).counts(seed)
        for kind in times:
            start = time.perf_counter()
            cost.choose(model, "multiply", cost.Load.of(counts), *K3[0][1:], 0, names)
            times[kind].append(1e6 * (time.perf_counter() - start))
    return {kind: statistics.median(values) for kind, values in times.items()}


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--seed", type=int, default=0, help="of the loads")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each backend, four calls each")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="fit the cost model, write it to FILE")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="fit to what --json kept in FILE")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quick = options.quick or device == "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.calibrate:
        earlier = options.measured and json.loads(options.measured.read_text())
        raw = earlier or measured(options.seed, quick, device)
        if options.json:
            options.json.write_text(json.dumps(raw) + "\n")
        calibrate(raw, options.calibrate)
        return
    rows = [compare(case, options.seed, options.rounds, device) for case in cases(quick)]
    shown = [{key: value for key, value in row.items() if key != "spread ms"} for row in rows]
    workload = {"dtype": "bfloat16", "seed": options.seed, "calls": 4 * options.rounds}
    found = {**figures(rows), "selection_us": selection_us(device), "workload": workload}
    report.publish({"benchmark": "grouped_gemm", **found, "rows": rows}, shown, options.json)


if __name__ == "__main__":
    main()

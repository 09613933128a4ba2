"""KDA's kernels: ours beside flash-linear-attention's, forward and forward + backward, in one run.

Workload: B = 1, D = Dv = 128, BF16, T tokens, H heads; `packed` cuts the row into documents of 1 to 4,096
tokens, drawn with a fixed seed. Times are milliseconds by device events, medians of the repeats. `speedup`
is fla's forward + backward over ours at the same T and H, `GB` the most memory beyond the inputs. `error` and
`worst gradient` are relative norms against the chunk form in FP64 on 1,024 tokens of the same kind; A_log's
gradient, one sum a head, is left out. Without a GPU neither runs: the table says so and times the chunk form.
`kernels`: of ours, the device time of each launch (medians by torch's profiler) beside its floor, the bytes
that it has to move at 4.28 TB/s; a second table shows them for the last T and H.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import report
from benchmarks.common.device import synchronize
from k3train.errors import UserError
from k3train.ops import backends
from k3train.ops.kda import delta_attention
from k3train.ops.packing import Packing

KERNELS = ("triton", "fla")
A_LOG = 5
BANDWIDTH = 4.28e12
"""Bytes a second, measured on an H200."""
C, STRIDE = 64, 8
"""Tokens of a chunk, and chunks from one state that forward keeps to the next."""
LAUNCHES = {
    "prepare": "prepare_kernel",
    "walk": "walk_kernel",
    "prepare again": "prepare_kernel",
    "walk again": "walk_kernel",
    "walk back": "walk_back_kernel",
    "values": "values_kernel",
    "keys": "keys_kernel",
}
"""Kernels of one forward and backward, in their order."""
LONGEST_DOCUMENT = 4096


def inputs_of(T: int, H: int, D: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, decay logits, beta, A_log and dt_bias."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    vectors = [normal(1, T, H, D).to(dtype) for _ in range(4)]
    constants = [torch.sigmoid(normal(1, T, H)), 0.3 * normal(H), normal(H * D) - 2]
    return [x.requires_grad_() for x in (*vectors, *constants)]


def packing_of(T: int, packed: bool, device: str) -> Packing:
    if not packed:
        return Packing.single(1, T, device)
    generator, tokens, end = torch.Generator().manual_seed(1), torch.zeros(1, T, dtype=torch.long), 0
    while (end := end + int(torch.randint(1, LONGEST_DOCUMENT + 1, (1,), generator=generator))) < T:
        tokens[0, end - 1] = 1
    return Packing.from_tokens(tokens.to(device), 1)


def run(inputs: list[Tensor], packing: Packing, backend: str) -> Tensor:
    return delta_attention(*inputs, lower_bound=-5.0, packing=packing, backend=backend)


def timed(function: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of each call behind two that warm up."""
    found = []
    for _ in range(repeats + 2):
        synchronize()
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            synchronize()
            found.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            function()
            found.append(1e3 * (time.perf_counter() - start))
    return found[2:]


def measure(inputs: list[Tensor], packing: Packing, backend: str, repeats: int) -> dict[str, Any]:
    """Times of one backend, and the memory that it takes at most."""
    weight = torch.randn_like(inputs[2])

    def forward() -> None:
        with torch.no_grad():
            run(inputs, packing, backend)

    def both() -> None:
        torch.autograd.grad(run(inputs, packing, backend), inputs, weight)

    found: dict[str, Any] = {"forward ms": statistics.median(timed(forward, repeats))}
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = timed(both, repeats)
    found |= {"fwd+bwd ms": statistics.median(times), "spread ms": [min(times), max(times)]}
    return found | {"GB": (torch.cuda.max_memory_allocated() - before) / 1e9 if cuda else None}


def moved_bytes(T: int, H: int, D: int) -> dict[str, float]:
    """Bytes that each launch reads and writes at least, of whole chunks in BF16; values are D wide too."""
    token, square, state = 2 * C * D, 2 * C * C, 2 * D * D
    chunk = {
        "prepare": 8 * token + 2 * square + 4 * D,
        "walk": 5 * token + square + 4 * D + 2 * state / STRIDE,
        "prepare again": 10 * token + square + 4 * D + 8 * C,
        "walk again": 4 * token + 4 * D + state + 2 * state / STRIDE,
        "walk back": 6 * token + 4 * D + state,
        "values": 6 * token + 3 * square,
        "keys": 9 * token + 2 * square + 2 * state,
    }
    return {name: T / C * H * size for name, size in chunk.items()}


def kernel_times(inputs: list[Tensor], packing: Packing, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of each launch of our kernels, beside its floor."""
    weight = torch.randn_like(inputs[2])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            torch.autograd.grad(run(inputs, packing, "triton"), inputs, weight)
        synchronize()
    ours = set(LAUNCHES.values())
    launches = [event for event in profile.events() if event.name in ours]
    launches.sort(key=lambda event: event.time_range.start)
    assert [event.name for event in launches] == list(LAUNCHES.values()) * repeats, launches
    _, T, H, D = inputs[0].shape
    return [
        {
            "kernel": name,
            "ms": statistics.median(e.time_range.elapsed_us() / 1e3 for e in launches[i :: len(LAUNCHES)]),
            "floor ms": 1e3 * size / BANDWIDTH,
        }
        for i, (name, size) in enumerate(moved_bytes(T, H, D).items())
    ]


def errors(backend: str, H: int, D: int, packed: bool, device: str, dtype: torch.dtype) -> dict[str, str]:
    """Of the output and of the worst gradient, on a short row."""
    T = 1024 if device == "cuda" else 128
    inputs, packing = inputs_of(T, H, D, device, dtype), packing_of(T, packed, device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    output, expected = run(inputs, packing, backend), run(exact, packing, "chunk")
    weight = torch.randn_like(output)
    grads = torch.autograd.grad(output, inputs, weight)
    expected_grads = torch.autograd.grad(expected, exact, weight.double())
    pairs = [pair for i, pair in enumerate(zip(grads, expected_grads, strict=True)) if i != A_LOG]
    worst = max(_relative(a, e) for a, e in pairs)
    return {"error": f"{_relative(output, expected):.1e}", "worst gradient": f"{worst:.1e}"}


def _relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def usable(device: str, dtype: torch.dtype) -> tuple[list[str], dict[str, str]]:
    """Kernels that run here, and why others do not."""
    names, missing = [], {}
    for name in KERNELS:
        try:
            names.append(backends.resolve("kda", name, device, dtype).name)
        except UserError as reason:
            missing[name] = str(reason)
    return names or ["chunk"], missing


def rows_of(T: int, H: int, D: int, packed: bool, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """One row for each backend of one workload."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs, packing = inputs_of(T, H, D, device, dtype), packing_of(T, packed, device)
    rows = []
    for name in names:
        found = measure(inputs, packing, name, repeats)
        found |= errors(name, H, D, packed, device, dtype)
        if name == "triton":
            found["kernels"] = kernel_times(inputs, packing, repeats)
        rows.append({"backend": name, "T": T, "H": H, "packed": packed, **found})
    times = {row["backend"]: row["fwd+bwd ms"] for row in rows}
    for row in rows:
        row["speedup"] = times["fla"] / row["fwd+bwd ms"] if "fla" in times else None
    return rows


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, action="append", help="T, may be repeated")
    parser.add_argument("--heads", type=int, action="append", help="H, may be repeated")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    large = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if large else ("cpu", torch.float32)
    names, missing = usable(device, dtype)
    width, repeats = (128 if large else 64), (3 if options.quick else options.repeats)
    lengths = options.tokens or ([1024, 8192, 32768, 131072, 262144] if large else [256])
    heads = options.heads or ([16, 32, 64, 96] if large else [2])
    if options.quick and large:
        lengths, heads = options.tokens or [8192], options.heads or [32]
    torch.set_num_threads(1)
    rows = []
    for T in lengths:
        for H in heads:
            for packed in (False, True):
                rows += rows_of(T, H, width, packed, names, repeats)
    for name, reason in missing.items():
        print(f"not run: {name}: {reason}")
    lists = ("spread ms", "kernels")
    shown = [{key: value for key, value in row.items() if key not in lists} for row in rows]
    if kernels := [row["kernels"] for row in rows if "kernels" in row]:
        print(report.table(kernels[-1]))
    workload = {"width": width, "tokens": lengths, "heads": heads, "repeats": repeats}
    report.publish(
        {"benchmark": "kda", "workload": workload, "rows": rows, "not_run": missing}, shown, options.json
    )


if __name__ == "__main__":
    main()

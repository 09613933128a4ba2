"""Block FP8 of saved activations beside a plain device copy of as many bytes, in one run.

Workload: vectors of normal numbers, BF16, of 1, 16, 64 and 256 Mi elements (on a CPU 1 Mi), encoded and
decoded by the reference and, on a GPU, by the fused kernels. GB/s counts bytes read and written: 2 of the
source, 1 of the code and 1/32 of the scale for each element. `of copy` is the time of a plain copy that moves
as many bytes over that of the operation; rounds are interleaved, medians with the fastest and slowest.
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

from benchmarks.common import report
from offload import fp8
from offload.fp8 import reference

Functions = dict[tuple[str, str], Callable[[], object]]


def functions(numel: int, device: torch.device, slow: bool) -> tuple[Functions, int]:
    """What is timed, and how many bytes each of it reads and writes."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(numel, generator=generator, device=device, dtype=torch.bfloat16)
    stored, nbytes = fp8.encode(x), x.nbytes + fp8.encoded_nbytes(numel)
    source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found: Functions = {
        ("copy", "encode"): lambda: target.copy_(source),
        ("copy", "decode"): lambda: target.copy_(source),
    }
    name = fp8.implementation(device)
    found[name, "encode"] = lambda: fp8.encode(x)
    found[name, "decode"] = lambda: fp8.decode(stored, numel, x.dtype)
    if slow and name != "reference":
        found["reference", "encode"] = lambda: reference.encode(x)
        found["reference", "decode"] = lambda: reference.decode(stored, numel, x.dtype)
    return found, nbytes


def seconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Mean time of a call among `repeats` in a row; on a GPU by its own clock."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The kernels queue up behind this, so that the host's time for starting them does not count.
    torch.cuda._sleep(3_000_000)
    first.record()
    for _ in range(repeats):
        function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


def rows_of(numel: int, device: torch.device, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each implementation and direction."""
    found, nbytes = functions(numel, device, slow=numel <= 2**26)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in found}
    for number in range(rounds + 1):
        for key, function in found.items():
            measured = seconds(function, device, repeats)
            if number:
                times[key].append(measured)
    rows = []
    for (name, direction), values in times.items():
        median, copy = statistics.median(values), statistics.median(times["copy", direction])
        rows.append(
            {
                "Mi elements": numel / 2**20,
                "direction": direction,
                "implementation": name,
                "us": median * 1e6,
                "GB/s": nbytes / median / 1e9,
                "of copy": copy / median,
                "spread us": [min(values) * 1e6, max(values) * 1e6],
            }
        )
    return rows


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    large = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if large else torch.device("cpu")
    torch.set_num_threads(1)
    sizes = [2**20, 2**24, 2**26, 2**28] if large and not options.quick else [2**20]
    rounds, repeats = (2, 3) if options.quick else (options.rounds, 10)
    rows = [row for numel in sizes for row in rows_of(numel, device, rounds, repeats)]
    why_not = fp8.triton_refuses(device)
    if why_not:
        print(f"triton: {why_not}", file=sys.stderr)
    shown = [{key: value for key, value in row.items() if key != "spread us"} for row in rows]
    figures = {"benchmark": "fp8_storage", "triton_refuses": why_not, "rounds": rounds, "rows": rows}
    report.publish(figures, shown, options.json)


if __name__ == "__main__":
    main()

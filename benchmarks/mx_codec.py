"""The MX formats: whether implementations agree bit for bit, what rounding costs in accuracy, and in time.

Workload: weights as at initialisation (normal, standard deviation 0.02) and rows as behind an activation
(normal times the exponential of a normal number), BF16, 4096 x 3584 on a GPU and 256 x 3584 on a CPU. For
each format and rule of the scale: relative RMS error, and the share of blocks whose largest value is
clipped. `equal` compares each implementation with the reference, and the reference with torchao where that
is installed, in codes and scales. Times are medians of interleaved rounds; `of copy` is the time of a
device copy that reads and writes as many bytes, over that of the operation.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import report
from benchmarks.fp8_storage import seconds
from k3train.ops import backends
from k3train.quant import mx
from k3train.quant.mx import FORMATS, MXFP4, MXFP8_E4M3, ROUNDINGS, Format, reference

WIDTH = 3584


def data(rows: int, device: torch.device) -> dict[str, Tensor]:
    """Tensors [rows, WIDTH] by name."""
    made = torch.Generator(device).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(rows, WIDTH, generator=made, device=device)

    return {"weights": (0.02 * normal()).bfloat16(), "rows": (normal() * normal().exp()).bfloat16()}


def accuracy(name: str, x: Tensor, fmt: Format, rounding: str) -> dict[str, Any]:
    """Errors of one format and rule on one tensor, and who agrees."""
    seen = reference.fake_quantise(x, fmt, rounding)
    error = (seen.float() - x.float()).square().mean().div(x.float().square().mean()).sqrt().item()
    scales = reference.scale_values(reference.encode(x, fmt, rounding)[1])
    largest = x.float().unflatten(-1, (-1, mx.BLOCK)).abs().amax(-1)
    return {
        "data": name,
        "format": fmt.name,
        "rule": rounding,
        "rms %": 100 * error,
        "clipped %": 100 * (largest > fmt.largest * scales).float().mean().item(),
        "idempotent": torch.equal(reference.fake_quantise(seen, fmt, rounding), seen),
        **{f"equal {each}": value for each, value in agreement(x, fmt, rounding, seen).items()},
    }


def agreement(x: Tensor, fmt: Format, rounding: str, seen: Tensor) -> dict[str, bool]:
    """Whether each other implementation has the reference's bits."""
    found = {}
    for backend in backends.usable("mx", x.device.type, x.dtype):
        if backend.name != "reference":
            same = torch.equal(mx.fake_quantise(x, fmt, rounding, backend=backend.name), seen)
            packed = mx.to_bytes(x, fmt, rounding, backend=backend.name)
            found[backend.name] = same and torch.equal(packed, reference.to_bytes(x, fmt, rounding))
    if importlib.util.find_spec("torchao") is not None:
        found["torchao"] = equals_torchao(x, fmt, rounding)
    return found


def equals_torchao(x: Tensor, fmt: Format, rounding: str) -> bool:
    """Whether torchao finds the same codes and scales."""
    torchao = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    element = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8_e4m3": torch.float8_e4m3fn}
    element["mxfp8_e5m2"] = torch.float8_e5m2
    rule = torchao.ScaleCalculationMode(rounding)
    scales, codes = torchao.to_mx(x, element[fmt.name], mx.BLOCK, rule)
    ours, our_scales = reference.encode(x, fmt, rounding)
    ours = reference.pack(ours) if fmt.bits == 4 else ours
    return torch.equal(codes.view(torch.uint8), ours) and torch.equal(scales.view(torch.uint8), our_scales)


def operations(x: Tensor, backend: str) -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed, and the bytes that it reads and writes."""
    packed = mx.to_bytes(x[None], MXFP4, backend=backend)
    both = x.nbytes + packed.nbytes
    return {
        "round to mxfp4": (lambda: mx.fake_quantise(x, MXFP4, backend=backend), 2 * x.nbytes),
        "round to mxfp8": (lambda: mx.fake_quantise(x, MXFP8_E4M3, backend=backend), 2 * x.nbytes),
        "pack": (lambda: mx.to_bytes(x[None], MXFP4, backend=backend), both),
        "unpack": (lambda: mx.from_bytes(packed, x.shape, MXFP4, x.dtype, backend=backend), both),
    }


def speed(x: Tensor, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each implementation and operation."""
    rows = []
    for backend in backends.usable("mx", x.device.type, x.dtype):
        for name, (function, nbytes) in operations(x, backend.name).items():
            source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=x.device)
            target = torch.empty_like(source)
            times: list[tuple[float, float]] = []
            for _ in range(rounds + 1):
                copy = seconds(lambda a=target, b=source: a.copy_(b), x.device, repeats)  # type: ignore[misc]
                times.append((seconds(function, x.device, repeats), copy))
            own, copies = (statistics.median(column) for column in zip(*times[1:], strict=True))
            rows.append(
                {
                    "operation": name,
                    "implementation": backend.name,
                    "us": own * 1e6,
                    "GB/s": nbytes / own / 1e9,
                    "of copy": copies / own,
                }
            )
    return rows


def main() -> None:
    parser = report.arguments(__doc__ or "")
    options = parser.parse_args()
    large = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if large else torch.device("cpu")
    torch.set_num_threads(1)
    tensors = data(4096 if large else 64 if options.quick else 256, device)
    errors = [
        accuracy(name, x, fmt, rounding)
        for name, x in tensors.items()
        for fmt in FORMATS.values()
        for rounding in ROUNDINGS
    ]
    print(report.table(errors), end="\n\n")
    times = speed(tensors["weights"], *((2, 2) if options.quick else (7, 10)))
    figures = {"benchmark": "mx_codec", "shape": [*tensors["weights"].shape], "errors": errors}
    report.publish({**figures, "times": times}, times, options.json)


if __name__ == "__main__":
    main()

"""Every backend of KDA, AttnRes, short convolution, SiTU-GLU and attention beside its plain reference.

Workload: one sequence of T tokens as one document; heads H of width D for KDA, queries and keys of 1.5 D for
attention, H * D channels for AttnRes (five sources) and the short convolution, 24 D for the inner width of
SiTU-GLU. BF16 on a GPU (H 32, D 128, T 8192 and 32768), FP32 on CPU (H 4, D 64, T 256).

Times are milliseconds, medians of the repeats with the fastest and slowest in the JSON. `speedup` is the
reference's forward + backward over the backend's, at the same T in this run; it is "-" where the reference
would need more memory than there is, or walks token by token for minutes. `error` is the relative norm of the
difference to the reference in FP64 on a short sequence: of the output, and the worst of the gradients.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import report
from benchmarks.common.device import synchronize
from k3train.errors import UserError
from k3train.ops import backends
from k3train.ops.attention import causal_attention
from k3train.ops.attn_res import attn_res
from k3train.ops.kda import delta_attention
from k3train.ops.packing import Packing
from k3train.ops.short_conv import short_conv
from k3train.ops.situ import situ_glu

Inputs = list[Tensor]


@dataclass(frozen=True)
class Operator:
    """How to make an operator's inputs and run it; `longest` is where its reference still runs."""

    reference: str
    longest: int
    inputs: Callable[[int, int, int], Inputs]
    run: Callable[[Inputs, Packing, str], Tensor]


def normal(*shape: int) -> Tensor:
    """Numbers from the seeded generator, FP32 on the CPU."""
    return torch.randn(shape)


def _kda_inputs(T: int, H: int, D: int) -> Inputs:
    vectors = [normal(1, T, H, D) for _ in range(4)]  # q, k, v, decay logits
    return [*vectors, torch.sigmoid(normal(1, T, H)), 0.3 * normal(H), normal(H * D) - 2]


def _run_kda(inputs: Inputs, packing: Packing, backend: str) -> Tensor:
    return delta_attention(*inputs, lower_bound=-5.0, packing=packing, backend=backend)


def _attn_res_inputs(T: int, H: int, D: int) -> Inputs:
    return [0.1 * normal(H * D), 1 + 0.1 * normal(H * D), *(normal(1, T, H * D) for _ in range(5))]


def _run_attn_res(inputs: Inputs, packing: Packing, backend: str) -> Tensor:
    query, norm_weight, *sources = inputs
    return attn_res(sources, query, norm_weight, backend=backend)


def _run_attention(inputs: Inputs, packing: Packing, backend: str) -> Tensor:
    return causal_attention(*inputs, scale=inputs[0].shape[-1] ** -0.5, packing=packing, backend=backend)


OPERATORS = {
    "kda": Operator("recurrent", 1024, _kda_inputs, _run_kda),
    "attn_res": Operator("reference", 32768, _attn_res_inputs, _run_attn_res),
    "short_conv": Operator(
        "reference",
        32768,
        lambda T, H, D: [normal(1, T, H * D), 0.5 * normal(H * D, 1, 4)],
        lambda inputs, packing, backend: short_conv(inputs[0], inputs[1], packing, backend),
    ),
    "situ": Operator(
        "reference",
        32768,
        lambda T, H, D: [4 * normal(T, 2 * 24 * D)],
        lambda inputs, packing, backend: situ_glu(inputs[0], backend=backend),
    ),
    "attention": Operator(
        "reference",
        8192,
        lambda T, H, D: [normal(1, T, H, width) for width in (D * 3 // 2, D * 3 // 2, D)],
        _run_attention,
    ),
}
# Parameters that the model keeps in FP32 beside BF16 activations, by their place among the inputs.
FP32_INPUTS = {"kda": (4, 5, 6), "attn_res": (), "short_conv": (1,), "situ": (), "attention": ()}


def place(op: str, inputs: Inputs, device: str, dtype: torch.dtype) -> Inputs:
    """Leaves on the device, in the types that the model uses; FP64 for all when `dtype` is."""
    kept = () if dtype is torch.float64 else FP32_INPUTS[op]
    return [
        x.to(device, torch.float32 if index in kept else dtype).requires_grad_()
        for index, x in enumerate(inputs)
    ]


def measure(op: str, backend: str, inputs: Inputs, packing: Packing, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each forward, and of each forward and backward."""
    run = OPERATORS[op].run
    with torch.no_grad():
        weight = torch.randn_like(run(inputs, packing, backend))

    def forward() -> None:
        with torch.no_grad():
            run(inputs, packing, backend)

    def both() -> None:
        torch.autograd.grad(run(inputs, packing, backend), inputs, weight)

    return {"forward": timed(forward, repeats), "forward_backward": timed(both, repeats)}


def timed(function: Callable[[], None], repeats: int) -> list[float]:
    """Milliseconds of each call behind two that warm up, device work included."""
    milliseconds = []
    for _ in range(repeats + 2):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return milliseconds[2:]


def errors(op: str, backend: str, inputs: Inputs, packing: Packing) -> tuple[float, float]:
    """Relative error of the output, and the worst of the gradients, against the reference in FP64."""
    operator = OPERATORS[op]
    exact = place(op, [x.detach() for x in inputs], str(inputs[0].device), torch.float64)
    output = operator.run(inputs, packing, backend)
    expected = operator.run(exact, packing, operator.reference)
    weight = torch.randn_like(output)
    grads = torch.autograd.grad(output, inputs, weight)
    expected_grads = torch.autograd.grad(expected, exact, weight.double())
    worst = max(relative(a, e) for a, e in zip(grads, expected_grads, strict=True))
    return relative(output, expected), worst


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def usable(op: str, device: str, dtype: torch.dtype) -> list[str]:
    """Backends of an operator that run here, fastest first."""
    names = []
    for row in backends.report():
        if row[0] == op:
            with contextlib.suppress(UserError):
                names.append(backends.resolve(op, row[1], device, dtype).name)
    return names


def rows_of(
    op: str, lengths: Sequence[int], heads: int, width: int, repeats: int, short: int
) -> list[dict[str, Any]]:
    """One row for each length and backend of an operator."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    operator, rows = OPERATORS[op], []
    names = usable(op, device, dtype)
    torch.manual_seed(0)
    sample = operator.inputs(short, heads, width)
    found = {
        name: errors(op, name, place(op, sample, device, dtype), Packing.single(1, short, device))
        for name in names
    }
    for length in lengths:
        inputs = place(op, operator.inputs(length, heads, width), device, dtype)
        packing = Packing.single(1, length, device)
        times = {
            name: measure(op, name, inputs, packing, repeats)
            for name in names
            if name != operator.reference or length <= operator.longest
        }
        reference = times.get(operator.reference)
        rows += [row(op, name, length, times[name], reference, found[name]) for name in times]
    return rows


def row(
    op: str,
    backend: str,
    length: int,
    times: dict[str, list[float]],
    reference: dict[str, list[float]] | None,
    error: tuple[float, float],
) -> dict[str, Any]:
    """Figures of one backend at one length."""
    forward, both = (statistics.median(times[key]) for key in ("forward", "forward_backward"))
    return {
        "operator": op,
        "backend": backend,
        "T": length,
        "forward ms": forward,
        "fwd+bwd ms": both,
        "speedup": statistics.median(reference["forward_backward"]) / both if reference else None,
        "error": error[0],
        "worst gradient": error[1],
        "spread ms": [min(times["forward_backward"]), max(times["forward_backward"])],
    }


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, action="append", help="T, may be repeated")
    parser.add_argument(
        "--op", action="append", choices=OPERATORS, help="only this operator, may be repeated"
    )
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    large = torch.cuda.is_available()
    heads, width = (32, 128) if large else (4, 64)
    lengths = options.tokens or ([8192, 32768] if large and not options.quick else [256])
    repeats, short = (3, 128) if options.quick else (options.repeats, 512 if large else 128)
    torch.set_num_threads(1)
    rows = []
    for op in options.op or OPERATORS:
        rows += rows_of(op, lengths, heads, width, repeats, short)
    shown = [{key: value for key, value in entry.items() if key != "spread ms"} for entry in rows]
    for entry in shown:
        entry |= {key: f"{entry[key]:.1e}" for key in ("error", "worst gradient")}
    workload = {"heads": heads, "width": width, "tokens": lengths, "error_tokens": short, "repeats": repeats}
    report.publish({"benchmark": "operators", "workload": workload, "rows": rows}, shown, options.json)


if __name__ == "__main__":
    main()

"""Attention of long fragments of documents as causal squares, beside one kernel for fragments of any length.

Workload: what each of two context ranks computes of one document of T tokens under the deal of
`k3train.context_plan`, 8 heads, queries and keys 192 wide, values 128, BF16, forward and backward; on a CPU 2
heads of T = 512, FP32, with the softmax written out. `ideal` is half the time of the whole row on one rank by
the causal kernel; `of ideal` is the slower rank's time over it. `error` is the largest relative norm of a
difference, of the output and the gradients, to the kernel for any length.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import report
from benchmarks.common.device import synchronize
from k3train.context_plan import deal, joined
from k3train.model.mla_context import fragment_lengths
from k3train.ops.attention import Fragments, causal_attention
from k3train.ops.attention.pieces import CuDNN, WrittenOut, attend_in_pieces
from k3train.ops.packing import Packing

WIDTHS = (192, 192, 128)
SCALE = 192**-0.5
KEY_COST = 0.0
"""Of expanding a key, which is not measured here."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rank_lengths(tokens: int) -> list[list[tuple[int, int]]]:
    """Queries and keys of each fragment, by rank."""
    dealt = deal([0, tokens], 1, [0, tokens // 2, tokens], KEY_COST)
    return [fragment_lengths(joined(blocks), [0, tokens], tokens) for blocks in dealt.computed]


def ways(lengths: list[tuple[int, int]], cuda: bool) -> dict[str, Attend]:
    """What is compared, for one rank's fragments."""
    device = "cuda" if cuda else "cpu"
    fragments = Fragments.of(lengths, device)
    kernel = CuDNN() if cuda else WrittenOut()
    names = ("te", "flash") if cuda else ("reference",)
    found: dict[str, Attend] = {
        "squares": lambda q, k, v: attend_in_pieces(q, k, v, SCALE, fragments, kernel, _none)
    }
    for name in names:
        found[name] = partial(_by_backend, name, fragments)
    return found


def _by_backend(name: str, packing: Packing | Fragments, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if name == "te" and isinstance(packing, Fragments):
        from k3train.ops.attention.te import _packed

        return _packed(SCALE, q, k, v, packing)
    return causal_attention(q, k, v, scale=SCALE, packing=packing, backend=name)


def _none(q: Tensor, k: Tensor, v: Tensor, fragments: Fragments) -> Tensor:
    raise AssertionError("no fragment is short")


def measure(attend: Attend, queries: int, keys: int, repeats: int, cuda: bool) -> dict[str, Any]:
    """Milliseconds forward and backward behind one call that warms up, and the results."""
    heads, dtype = (8, torch.bfloat16) if cuda else (2, torch.float32)
    device = "cuda" if cuda else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(1, rows, heads, width, generator=generator, device=device, dtype=dtype)

    sides = zip((queries, keys, keys), WIDTHS, strict=True)
    inputs = [normal(rows, width).requires_grad_() for rows, width in sides]
    weight = normal(queries, WIDTHS[2])
    forward, backward, results = [], [], []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        output = attend(*inputs)
        synchronize()
        middle = time.perf_counter()
        gradients = torch.autograd.grad(output, inputs, weight)
        synchronize()
        forward.append(1e3 * (middle - start))
        backward.append(1e3 * (time.perf_counter() - middle))
        results = [output.detach(), *gradients]
    return {
        "forward ms": statistics.median(forward[1:]),
        "backward ms": statistics.median(backward[1:]),
        "results": results,
    }


def rows_of(tokens: int, repeats: int, cuda: bool) -> list[dict[str, Any]]:
    """A row for each rank and way, that of one rank with the whole row first."""
    device = "cuda" if cuda else "cpu"
    whole = partial(_by_backend, "te" if cuda else "reference", Packing.single(1, tokens, device))
    alone = measure(whole, tokens, tokens, repeats, cuda)
    ideal = (alone["forward ms"] + alone["backward ms"]) / 2
    rows = [{"T": tokens, "rank": "-", "way": "whole row", **_figures(alone, ideal, None)}]
    for rank, lengths in enumerate(rank_lengths(tokens)):
        queries, keys = (sum(side) for side in zip(*lengths, strict=True))
        measured = {
            name: measure(attend, queries, keys, repeats, cuda)
            for name, attend in ways(lengths, cuda).items()
        }
        exact = next(found for name, found in measured.items() if name != "squares")["results"]
        for name, found in measured.items():
            rows.append({"T": tokens, "rank": rank, "way": name, **_figures(found, ideal, exact)})
    return rows


def _figures(found: dict[str, Any], ideal: float, exact: list[Tensor] | None) -> dict[str, Any]:
    errors = [
        float((one.float() - other.float()).norm() / other.float().norm())
        for one, other in zip(found["results"], exact or [], strict=exact is not None)
    ]
    spent = found["forward ms"] + found["backward ms"]
    return {
        "forward ms": found["forward ms"],
        "backward ms": found["backward ms"],
        "of ideal": spent / ideal,
        "error": max(errors, default=0.0),
    }


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, action="append", help="T in units of 1024 (256)")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda:
        # On a CPU all fragments are short.
        from k3train.ops.attention import fragments, pieces

        fragments.LONG = pieces.NARROW = 1
    chosen = options.tokens or [64 if options.quick else 256]
    lengths = [1024 * count for count in chosen] if cuda else [512]
    rows = [row for tokens in lengths for row in rows_of(tokens, options.repeats, cuda)]
    slower = {
        way: max(row["of ideal"] for row in rows if row["way"] == way)
        for way in dict.fromkeys(row["way"] for row in rows)
    }
    report.publish({"benchmark": "attention_fragments", "of_ideal": slower, "rows": rows}, rows, options.json)


if __name__ == "__main__":
    main()

"""The loss of a large vocabulary: in chunks, by megatron-core, and by autograd, from features and the head.

Workload: T tokens, d hidden, v words; features, weight and the gradients of both in BF16 on a GPU (T 8192,
d 7168, v 32768 as `h200_slice` and 163840 as Kimi K3), FP32 on a CPU. A loss mask leaves out a tenth of the
tokens. `megatron` is what training takes where logits are small, `fused` the same with megatron-core's fused
cross-entropy, `triton` the chunks by kernels of ours (on a GPU), `reference` torch's own. Backends take
turns; times are milliseconds, medians of the repeats, fastest and slowest in the JSON. `time` and `memory`
are those of forward and backward over megatron's, `peak MB` the most beyond features and weight, `weight MB`
the part of it that is the weight's gradient, which all have. `loss error` and `worst gradient` are relative
norms against FP64 on 256 tokens and 2,048 words.
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
from benchmarks.common.live_bytes import peak_bytes
from parallel.cpu import enable_cpu

ORDER = ("megatron", "chunked", "triton", "fused", "reference")
SHORT = 256, 2048
Case = tuple[Tensor, Tensor, Tensor, Tensor]
Losses = Callable[[Tensor, Tensor, Tensor], Tensor]


def case(tokens: int, hidden: int, words: int, device: str, dtype: torch.dtype) -> Case:
    """Features [T, d], weight [v, d], labels [T], and the gradients of the losses [T]."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    labels = torch.randint(words, (tokens,), device=device, generator=generator)
    mask = (torch.rand(tokens, device=device, generator=generator) < 0.9).float()
    weight = normal(words, hidden).mul_(2 * hidden**-0.5)
    return normal(tokens, hidden).requires_grad_(), weight.requires_grad_(), labels, mask


def backends_of(logits_mib: int) -> dict[str, Losses]:
    """The ways to compute the losses of tokens, by name."""
    from k3train.ops.cross_entropy import token_losses

    def by_name(name: str) -> Losses:
        return lambda *inputs: token_losses(*inputs, backend=name, logits_mib=logits_mib)

    return {name: _fused if name == "fused" else by_name(name) for name in ORDER}


def _fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()
    losses: Tensor = fused_vocab_parallel_cross_entropy(
        torch.nn.functional.linear(hidden, weight)[:, None], labels[:, None], group
    )
    return losses[:, 0]


def both(losses: Losses, inputs: Case) -> tuple[Tensor, ...]:
    """Losses, and gradients of features and weight."""
    hidden, weight, labels, mask = inputs
    found = losses(hidden, weight, labels)
    return found.detach(), *torch.autograd.grad(found, (hidden, weight), mask.to(found.dtype))


def timed(function: Callable[[], Any]) -> float:
    """Milliseconds of one call, device work included."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def errors(
    ways: dict[str, Losses], hidden: int, device: str, dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """Relative error of the losses, and the worst of the gradients, of each backend."""
    inputs = case(SHORT[0], hidden, SHORT[1], device, dtype)
    doubled = tuple(x.detach().double().requires_grad_() for x in inputs[:2])
    exact = both(ways["reference"], (*doubled, *inputs[2:]))
    found = {}
    for name, losses in ways.items():
        pairs = zip(both(losses, inputs), exact, strict=True)
        loss, *gradients = [((a.double() - e).norm() / e.norm()).item() for a, e in pairs]
        found[name] = loss, max(gradients)
    return found


def measure(ways: dict[str, Losses], inputs: Case, repeats: int) -> dict[str, dict[str, Any]]:
    """Times and memory of each backend; they take turns."""
    forward: dict[str, list[float]] = {name: [] for name in ways}
    whole: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, losses in ways.items():
            with torch.no_grad():
                ahead = timed(lambda losses=losses: losses(*inputs[:3]))
            spent = timed(lambda losses=losses: both(losses, inputs))
            if turn:  # the first one warms up
                forward[name].append(ahead)
                whole[name].append(spent)
    peaks = {name: peak_bytes(lambda losses=losses: both(losses, inputs)) for name, losses in ways.items()}
    return {
        name: {
            "forward ms": statistics.median(forward[name]),
            "fwd+bwd ms": statistics.median(whole[name]),
            "spread ms": [min(whole[name]), max(whole[name])],
            "peak MB": peaks[name] / 1e6,
        }
        for name in ways
    }


def rows_of(
    tokens: int, hidden: int, words: int, logits_mib: int, repeats: int, missing: dict[str, str]
) -> list[dict[str, Any]]:
    """One row for each backend of one workload; `missing` gets those that cannot run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs, ways = case(tokens, hidden, words, device, dtype), backends_of(logits_mib)
    for name in list(ways):
        try:
            both(ways[name], case(8, hidden, 64, device, dtype))
        except Exception as error:  # a compiler that is not there raises nearly anything
            missing[name] = str(error).splitlines()[0]
            del ways[name]
    found = measure(ways, inputs, repeats)
    wrong = errors(ways, hidden, device, dtype)
    base = found["megatron"]
    return [
        {
            "backend": name,
            "T": tokens,
            "d": hidden,
            "v": words,
            **own,
            "time": own["fwd+bwd ms"] / base["fwd+bwd ms"],
            "memory": own["peak MB"] / base["peak MB"],
            "weight MB": inputs[1].nbytes / 1e6,
            "loss error": f"{wrong[name][0]:.1e}",
            "worst gradient": f"{wrong[name][1]:.1e}",
        }
        for name, own in found.items()
    ]


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, help="T")
    parser.add_argument("--hidden", type=int, help="d")
    parser.add_argument("--words", type=int, action="append", help="v, may be repeated")
    parser.add_argument("--logits-mib", type=int, help="of a chunk")
    parser.add_argument("--repeats", type=int)
    options = parser.parse_args()
    enable_cpu()
    from parallel.groups import destroy, initialize
    from parallel.topology import Topology

    large = torch.cuda.is_available()
    initialize(Topology(), timeout_minutes=5, seed=1)
    tokens = options.tokens or (8192 if large else 256)
    hidden = options.hidden or (7168 if large else 256)
    words = options.words or ([32768, 163840] if large else [8192] if options.quick else [32768, 163840])
    logits_mib = options.logits_mib or (512 if large else 2 if options.quick else 16)
    repeats = options.repeats or (3 if options.quick else 10 if large else 3)
    torch.set_num_threads(1)
    missing: dict[str, str] = {}
    rows = []
    for each in words:
        rows += rows_of(tokens, hidden, each, logits_mib, repeats, missing)
    destroy()
    shown = [{key: value for key, value in row.items() if key != "spread ms"} for row in rows]
    workload = {
        "tokens": tokens,
        "hidden": hidden,
        "words": words,
        "logits_mib": logits_mib,
        "repeats": repeats,
    }
    figures = {"benchmark": "cross_entropy", "workload": workload, "missing": missing, "rows": rows}
    report.publish(figures, shown, options.json)


if __name__ == "__main__":
    main()

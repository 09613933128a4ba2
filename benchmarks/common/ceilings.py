"""The fastest product and the fastest copy of this device, measured: what `floors` divides by.

Products are those of a configuration, in its dtype: rows of a micro-batch with the weights of a layer's
projections and of the head, and on a GPU one of 8,192 cubed. Each figure is the fastest of its repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from k3train.config import Config
from k3train.microbatch import tokens_per_microbatch
from k3train.model.transformer_config import DTYPES

from .device import synchronize
from .floors import Ceilings

REPEATS = 10


def measure(config: Config) -> tuple[Ceilings, dict[str, float]]:
    """Ceilings, and what each product and the copy reached: TFLOP/s and GB/s by name."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = DTYPES[config.model.dtype]
    reached: dict[str, float] = {}
    for name, (m, k, n) in _shapes(config, cuda).items():
        a, b = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((m, k), (n, k)))
        seconds = fastest(lambda a=a, b=b: torch.nn.functional.linear(a, b))
        reached[f"{name} {m}x{k}x{n} TFLOP/s"] = 2.0 * m * k * n / seconds / 1e12
        del a, b
    best = max(reached.values())
    source = torch.empty(1 << (30 if cuda else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / fastest(lambda: target.copy_(source))
    reached["copy GB/s"] = copied / 1e9
    return Ceilings(best * 1e12, copied, "measured in this run"), reached


def fastest(function: Callable[[], Any]) -> float:
    """Seconds of the fastest call behind two that warm up, device work included."""
    found = []
    for _ in range(REPEATS + 2):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        found.append(time.perf_counter() - start)
    return min(found[2:])


def _shapes(config: Config, cuda: bool) -> dict[str, tuple[int, int, int]]:
    """Rows, inner width and columns."""
    model, tokens = config.model, tokens_per_microbatch(config)
    assert model.vocab_size is not None
    found = {
        "projection": (tokens, model.hidden_size, model.num_heads * model.kda_head_dim),
        "dense": (tokens, model.hidden_size, 2 * model.dense_ffn_size),
        "head": (tokens, model.hidden_size, model.vocab_size),
    }
    if cuda:
        found["cube"] = (8192, 8192, 8192)
    return found

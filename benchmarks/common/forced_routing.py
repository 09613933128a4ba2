"""Makes routers choose by a popularity that is given, in k3train's model and in megatron-core's.

A router does all of its own work, and what it chose is put aside. The n-th call of any router takes the n-th
of some prepared choices, in turn. Letters: t tokens, k experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from k3train.config import Config
from k3train.microbatch import tokens_per_microbatch

from .routing import choices, count, popularity

KINDS = ("router", "balanced", "zipf")
PREPARED = 4
EXPONENT = 1.0


def prepared(config: Config, kind: str, device: torch.device) -> list[Tensor]:
    """Choices int64 [t, k]; none for `router`, which leaves routers alone."""
    if kind == "router" or not config.model.num_experts:
        return []
    model = config.model
    popular = popularity("uniform" if kind == "balanced" else f"zipf:{EXPONENT}", model.num_experts)
    tokens = tokens_per_microbatch(config)
    return [choices(popular, tokens, model.top_k, seed=seed).to(device) for seed in range(PREPARED)]


def skew(found: list[Tensor], experts: int) -> float:
    """Largest load over the mean, of all choices together."""
    loads = sum((count(each.cpu(), experts) for each in found), torch.zeros(experts, dtype=torch.int32))
    return float(loads.max() / loads.float().mean())


@contextmanager
def forced(found: list[Tensor]) -> Iterator[None]:
    """Inside, routers of k3train's model choose what is given; of all experts, by their number."""
    from k3train.model import router

    if not found:
        yield
        return
    own, following = router.route, cycle(found)

    def route(scores: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        _, cutoff = own(scores, bias, top_k)
        return next(following), cutoff

    router.route = route
    try:
        yield
    finally:
        router.route = own


def force_plain(model: Any, found: list[Tensor]) -> None:
    """Let the routers of a megatron-core model choose what is given, for good."""
    from megatron.core.transformer.moe.router import TopKRouter

    following = cycle(found)
    for module in model.modules() if found else ():
        if isinstance(module, TopKRouter):
            module.routing = _routing(module.routing, following)


def _routing(own: Any, following: Iterator[Tensor]) -> Any:
    def routing(logits: Tensor, *rest: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        own(logits, *rest, **keywords)
        scores = torch.sigmoid(logits.view(-1, logits.shape[-1]).float())  # [t, E]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, next(following), True)
        kept = scores * chosen
        return (kept / kept.sum(-1, keepdim=True)).to(logits.dtype), chosen

    return routing

"""What routers choose, made up or recorded: popularities of experts, choices of tokens, and their counts.

Letters: R ranks, E experts, S tokens of a rank, K experts of a token. Everything follows from a seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

SHUFFLE = 1024
"""Tokens that see the experts in one order while they choose."""


def popularity(kind: str, experts: int, seed: int = 0) -> Tensor:
    """[E] FP64 summing to 1, in a random order of experts.

    `kind` is "uniform", "lognormal:SIGMA" (exp of a normal, as upstream has it), "zipf:EXPONENT" (rank to
    the power of -EXPONENT), or "hot:SHARE" (one expert with that share, the others alike).
    """
    name, _, value = kind.partition(":")
    generator = torch.Generator().manual_seed(seed)
    if name == "lognormal":
        weight = torch.exp(float(value) * torch.randn(experts, generator=generator, dtype=torch.float64))
    elif name == "zipf":
        weight = torch.arange(1, experts + 1, dtype=torch.float64) ** -float(value)
    elif name == "hot":
        weight = torch.full((experts,), (1 - float(value)) / max(1, experts - 1), dtype=torch.float64)
        weight[0] = float(value)
    else:
        assert kind == "uniform", f"unknown popularity {kind}"
        weight = torch.ones(experts, dtype=torch.float64)
    weight = weight[torch.randperm(experts, generator=generator)]
    return weight / weight.sum()


def choices(popular: Tensor, tokens: int, top_k: int, seed: int) -> Tensor:
    """int64 [S, K]: K different experts for each token of one rank.

    Expert e is among them with probability min(1, c * popular[e]), c such that these sum to K: systematic
    sampling, so that counts follow the popularity as closely as distinct choices allow.
    """
    generator = torch.Generator().manual_seed(seed)
    chance = _chances(popular, top_k)
    parts = []
    for begin in range(0, tokens, SHUFFLE):
        order = torch.randperm(len(popular), generator=generator)
        ends = chance[order].cumsum(0)
        ends[-1] = top_k
        start = torch.rand(min(SHUFFLE, tokens - begin), 1, generator=generator, dtype=torch.float64)
        at = torch.searchsorted(ends, start + torch.arange(top_k), right=True)
        parts.append(order[at.clamp(max=len(popular) - 1)])
    return torch.cat(parts) if parts else torch.empty(0, top_k, dtype=torch.int64)


def count(choice: Tensor, experts: int) -> Tensor:
    """[..., K] to int32 [E], entries of each expert."""
    return torch.bincount(choice.flatten(), minlength=experts).int()


def gathered(popular: Tensor, ranks: int, tokens: int, top_k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Counts int32 [R, E] of ranks that share a popularity, and the choice [S, K] of rank 0.

    The other ranks' counts are drawn without choices: binomial of the same chances, settled to S * K.
    """
    generator = torch.Generator().manual_seed(seed)
    choice = choices(popular, tokens, top_k, seed)
    chance = _chances(popular, top_k).expand(ranks, -1)
    drawn = torch.binomial(torch.full_like(chance, tokens), chance, generator=generator).int()
    drawn[0] = count(choice, len(popular))
    for row in drawn[1:]:
        _settle(row, tokens * top_k, tokens, generator)
    return drawn, choice


def _settle(row: Tensor, total: int, most: int, generator: torch.Generator) -> None:
    """Add or take one at random experts of [E], in place, until they sum to `total`."""
    while missing := total - int(row.sum()):
        able = (row < most if missing > 0 else row > 0).nonzero().flatten()
        picked = able[torch.randperm(len(able), generator=generator)[: abs(missing)]]
        row[picked] += 1 if missing > 0 else -1


def recorded(file: Path) -> dict[int, list[list[list[int]]]]:
    """Counts [R][E] of each line of a routing-STAGE.jsonl, by layer; experts by their number in the model.

    Raises:
        SystemExit: in one line, if that is not what the file has.
    """
    layers: dict[int, list[list[list[int]]]] = {}
    try:
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            layers.setdefault(entry["layer"], []).append(entry["counts"])
    except OSError as error:
        raise SystemExit(f"--trace {file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        layers = {}
    if not layers:
        raise SystemExit(f"--trace {file}: no routing-STAGE.jsonl, which a run with log.routing_steps writes")
    return dict(sorted(layers.items()))


def adversarial(ranks: int, experts: int, share: int = 1) -> Tensor:
    """Counts [R, E] that need the most slots: rank 0's experts get nothing, all others the same.

    Theorem 2 of MoonEP: some rank then needs at least ceil(E (R - 1) / R^2) experts of others. Every entry of
    the matrix is a multiple of `share`, and large enough that capacities divide evenly.
    """
    counts = torch.full((ranks, experts), ranks * share, dtype=torch.int32)
    counts[:, : experts // ranks] = 0
    return counts


def one_expert(ranks: int, experts: int, entries: int, expert: int = 0) -> Tensor:
    """Counts [R, E] of ranks that send all their entries to one expert."""
    counts = torch.zeros(ranks, experts, dtype=torch.int32)
    counts[:, expert] = entries
    return counts


def _chances(popular: Tensor, top_k: int) -> Tensor:
    """[E] inclusion probabilities min(1, c * popular) that sum to K."""
    assert top_k <= int((popular > 0).sum()), f"{top_k} different experts of {int((popular > 0).sum())}"
    certain = torch.zeros_like(popular, dtype=torch.bool)
    while True:
        rest = torch.where(certain, 0.0, popular)
        chance = torch.where(certain, 1.0, rest / rest.sum() * (top_k - int(certain.sum())))
        if not (chance > 1).any():
            return chance
        certain |= chance >= 1

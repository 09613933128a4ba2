"""Cases that every backend of the planner has to plan like the reference, on any device.

Letters: R ranks, E experts, P = E/R, S tokens of a rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

from benchmarks.common import routing
from parallel.moonep.plan import Plan, plan

Choices = list[Tensor]  # of each rank, [S, K]


@dataclass(frozen=True)
class Case:
    """A layer to plan; all its ranks."""

    places: int
    top_k: int
    tokens: tuple[int, ...]
    """S of each rank."""
    kind: str
    """A popularity of `routing`, or a name in `_RULES`."""
    pad: int = 1

    @property
    def experts(self) -> int:
        return self.places * len(self.tokens)

    def choices(self) -> Choices:
        """int64 [S, K] for each rank."""
        rule = _RULES.get(self.kind)
        return [
            rule(self, rank) if rule else self._drawn(rank, tokens) for rank, tokens in enumerate(self.tokens)
        ]

    def _drawn(self, rank: int, tokens: int) -> Tensor:
        popular = routing.popularity(self.kind, self.experts, seed=7)
        return routing.choices(popular, tokens, self.top_k, seed=rank)


def _spread(case: Case, rank: int, begin: int, width: int) -> Tensor:
    """Experts begin .. begin + width - 1 in turn."""
    tokens = case.tokens[rank]
    return begin + torch.arange(tokens * case.top_k).view(tokens, case.top_k) % width


def _repeated(case: Case, rank: int) -> Tensor:
    """Every token chooses one expert K times."""
    token = torch.randint(case.experts, (case.tokens[rank], 1), generator=torch.Generator().manual_seed(rank))
    return token.expand(-1, case.top_k).contiguous()


def _careless(case: Case, rank: int) -> Tensor:
    """Draws with replacement, most of them among the first few experts."""
    shape = case.tokens[rank], case.top_k
    chance = torch.rand(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (case.experts * chance**4).long()


_RULES: dict[str, Callable[[Case, int], Tensor]] = {
    "round robin": lambda case, rank: _spread(case, rank, 0, case.experts),
    "local": lambda case, rank: _spread(case, rank, rank * case.places, case.places),
    "next rank": lambda case, rank: _spread(
        case, rank, (rank + 1) % len(case.tokens) * case.places, case.places
    ),
    "rank 0 idle": lambda case, rank: _spread(case, rank, case.places, case.experts - case.places),
    "one home": lambda case, rank: _spread(case, rank, 0, case.places),
    "half idle": lambda case, rank: _spread(case, rank, case.experts // 2, case.experts // 2),
    "one expert": lambda case, rank: _spread(case, rank, case.experts // 2, 1),
    "repeated": _repeated,
    "careless": _careless,
}

# The planning cases of upstream's suite, then what theirs lacks.
CASES = {
    "round robin": Case(16, 8, (256,) * 4, "round robin", 128),
    "smallest": Case(1, 1, (1,) * 4, "round robin", 8),
    "few tokens": Case(3, 5, (3,) * 4, "lognormal:1", 32),
    "many for two": Case(2, 2, (33,) * 4, "lognormal:1"),
    "odd": Case(3, 3, (17,) * 4, "lognormal:0.5", 16),
    "odd in turn": Case(3, 3, (17,) * 4, "round robin", 16),
    "very skewed": Case(5, 2, (64,) * 4, "lognormal:5", 128),
    "padded": Case(4, 4, (32,) * 4, "lognormal:1", 64),
    "three": Case(7, 3, (96,) * 4, "lognormal:2", 128),
    "256 experts": Case(256, 1, (1024,) * 4, "lognormal:1"),
    "320 experts": Case(320, 1, (2048,) * 4, "lognormal:1"),
    "320 on eight": Case(320, 1, (1536,) * 8, "lognormal:1"),
    "1025 experts": Case(1025, 1, (256,) * 2, "lognormal:1"),
    "all local": Case(6, 2, (24,) * 4, "local", 8),
    "all to the next": Case(6, 2, (24,) * 4, "next rank", 8),
    "all k to one": Case(4, 6, (20,) * 4, "repeated", 16),
    "exact segments": Case(4, 2, (32,) * 4, "one expert", 16),
    "tail padding": Case(4, 2, (31,) * 4, "one expert", 16),
    "one rank": Case(9, 4, (50,), "zipf:1.0", 8),
    "one rank, one expert": Case(1, 1, (5,), "uniform"),
    "two ranks": Case(8, 4, (40, 40), "zipf:1.2", 4),
    "not a power of two": Case(7, 5, (30,) * 6, "zipf:0.5", 3),
    "unequal": Case(6, 3, (50, 1, 17, 0, 33), "lognormal:1", 4),
    "only one has tokens": Case(5, 3, (0, 0, 41, 0), "careless", 4),
    "no tokens at all": Case(5, 3, (0,) * 4, "uniform", 4),
    "fewer rows than ranks": Case(2, 1, (1, 0, 1, 0, 1, 0, 0, 0), "one expert"),
    "one expert takes all": Case(4, 1, (300,) * 8, "one expert", 8),
    "equal quotas": Case(3, 2, (7,) * 5, "one home", 2),
    "ties": Case(3, 4, (18,) * 6, "half idle", 2),
    "hardest": Case(14, 4, (195,) * 8, "rank 0 idle"),
    "careless": Case(10, 16, (130,) * 8, "careless", 16),
    "many choices": Case(5, 32, (60,) * 8, "lognormal:1", 16),
    "across blocks": Case(14, 16, (700,) * 8, "zipf:1.0", 16),
}  # fmt: skip


def counts_of(choices: Sequence[Tensor], experts: int) -> Tensor:
    """int32 [R, E]."""
    return torch.stack([routing.count(choice, experts) for choice in choices])


@cache
def expected(name: str) -> list[Plan]:
    """The reference's plans of all ranks."""
    return plans(name, "reference", "cpu")


def plans(name: str, backend: str, device: str) -> list[Plan]:
    """All ranks' plans by one backend, verified."""
    case = CASES[name]
    choices = [choice.to(device) for choice in case.choices()]
    counts = counts_of(choices, case.experts)
    return [
        plan(counts, choice, rank, pad=case.pad, backend=backend, debug=True)
        for rank, choice in enumerate(choices)
    ]


def same(actual: Plan, wanted: Plan) -> None:
    """Equal in every value, type and shape."""
    for field in fields(Plan):
        ours, theirs = getattr(actual, field.name), getattr(wanted, field.name)
        if isinstance(theirs, Tensor):
            assert ours.dtype == theirs.dtype, field.name
            assert torch.equal(ours.cpu(), theirs.cpu()), field.name
        else:
            assert ours == theirs, field.name

"""What MoonEP promises for every routing: exact balance, few slots, few fills, one donor.

Letters: R ranks, E experts, P = E/R, n cases of one shape. K3's layer has E = 896, K = 16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.common import routing
from parallel.moonep.plan import Plan, plain, plan, reference
from parallel.moonep.plan.invariants import check_allocation
from parallel.moonep.plan.types import stay

EXPERTS, TOP_K, TOKENS = 896, 16, 8192
# Cases of each (R, P): 100,000.
FUZZ = {
    (1, 4): 5_000, (2, 1): 15_000, (2, 7): 20_000, (3, 3): 20_000, (4, 12): 12_000, (5, 2): 14_000,
    (6, 5): 8_000, (8, 4): 4_000, (11, 3): 1_200, (16, 6): 800,
}  # fmt: skip


def _patterns(ranks: int, places: int, n: int, generator: torch.Generator) -> Tensor:
    """int64 [n, R, E]: even, sparse, power-law, hot and group-hot loads; some sources idle, some unequal."""
    experts = ranks * places
    drawn = torch.rand(n, ranks, experts, generator=generator)
    weight = torch.rand(n, 1, experts, generator=generator)
    kind = torch.arange(n)[:, None, None] % 5
    group = torch.randint(ranks, (n, 1, 1), generator=generator)
    home = torch.arange(experts) // places
    shaped = torch.where(kind == 0, drawn * 4, drawn * weight**12 * 60)
    shaped = torch.where(kind == 2, (drawn > 0.9) * 9.0, shaped)
    shaped = torch.where(kind == 3, drawn * 2 + 200 * (weight == weight.amax(2, keepdim=True)), shaped)
    shaped = torch.where(kind == 4, drawn * torch.where(home == group, 50, 2), shaped)
    idle = torch.rand(n, ranks, 1, generator=generator) < 0.15
    return (shaped * ~idle).long()


def _planned(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Allocations [n, R, E] of the reference, and its moves [m, 4]: case, expert, destination, rows."""
    _, ranks, experts = counts.shape
    load = counts.sum(1)
    found = [(case, *move) for case, row in enumerate(load.tolist()) for move in reference.moves(row, ranks)]
    moves = torch.tensor(found, dtype=torch.int64).view(-1, 4)
    case, expert, destination, rows = moves.t()
    home = expert // (experts // ranks)
    alloc = torch.zeros_like(counts)
    own = torch.arange(experts)
    alloc[:, own // (experts // ranks), own] = load
    alloc[case, destination, expert] = rows
    alloc.index_put_((case, home, expert), -rows, accumulate=True)
    return alloc, moves


@pytest.mark.parametrize(("ranks", "places"), FUZZ)
def test_any_counts_are_balanced_within_the_bounds(ranks: int, places: int) -> None:
    counts = _patterns(ranks, places, FUZZ[ranks, places], torch.Generator().manual_seed(ranks * places))
    alloc, moves = _planned(counts)
    check_allocation(alloc, counts)
    case, expert, destination, _ = moves.t()
    fills = torch.stack([case, destination, expert // places], 1).unique(dim=0)
    receivers = fills[:, :2].unique(dim=0)
    assert len(fills) == len(receivers)  # one donor for each rank
    assert receivers[:, 0].bincount(minlength=1).max() <= ranks - 1


@pytest.mark.parametrize(("ranks", "needed"), [(8, 98), (16, 53), (32, 28), (64, 14)])
def test_the_hardest_routing_takes_exactly_the_slots_that_it_must(ranks: int, needed: int) -> None:
    counts = routing.adversarial(ranks, EXPERTS)
    assert needed == -(-EXPERTS * (ranks - 1) // ranks**2)
    alloc = plain.fill(counts)
    check_allocation(alloc, counts)
    assert _replicas(alloc).max() == needed <= EXPERTS // ranks
    assert len(reference.donations(counts.sum(0).tolist(), ranks)) <= ranks - 1


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["lognormal:0.1", "lognormal:1", "lognormal:5", "zipf:0.5", "zipf:1.2"])
def test_max_over_mean_is_one_at_full_size(ranks: int, kind: str) -> None:
    counts, choice = routing.gathered(routing.popularity(kind, EXPERTS), ranks, TOKENS, TOP_K, seed=3)
    made = plan(counts, choice[:64], 0, total_rows=TOKENS * TOP_K * ranks)
    before = stay(counts.sum(0), ranks).sum(1)
    assert before.max() > before.float().mean()
    assert made.load.tolist() == [TOKENS * TOP_K] * ranks
    assert _replicas(made.alloc).max() <= 14


def test_all_rows_of_a_full_size_rank_are_laid_out() -> None:
    counts, choice = routing.gathered(routing.popularity("zipf:1.0", EXPERTS), 64, TOKENS, TOP_K, seed=3)
    made: Plan = plan(counts, choice, 0, pad=16, total_rows=TOKENS * TOP_K * 64, debug=True)
    assert made.stride == TOKENS * TOP_K + 15 * 28 + 12
    # Distinct experts of a token share destinations less the more ranks there are.
    assert 13 < made.unique.sum().item() / TOKENS < 15.5


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_one_expert_may_take_everything(ranks: int) -> None:
    counts = routing.one_expert(ranks, 128, entries=1000, expert=5)
    alloc = plain.fill(counts)
    check_allocation(alloc, counts)
    assert alloc[:, 5].tolist() == [1000] * ranks


def _replicas(alloc: Tensor) -> Tensor:
    ranks, experts = alloc.shape
    home = torch.arange(experts) // (experts // ranks)
    return ((alloc > 0) & (home != torch.arange(ranks)[:, None])).sum(1)

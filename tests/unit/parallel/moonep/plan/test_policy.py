"""The policies that are there to be compared, and the map of experts to ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.common import routing
from parallel.moonep.plan import FILL, NONE, Eplb, Plan, backends, check, place, plan
from parallel.moonep.plan.eplb import placement
from parallel.moonep.plan.policy import Policy

RANKS, EXPERTS, TOKENS, TOP_K = 8, 64, 512, 4


def step(seed: int, kind: str = "lognormal:1") -> tuple[Tensor, Tensor]:
    return routing.gathered(routing.popularity(kind, EXPERTS), RANKS, TOKENS, TOP_K, seed)


def planned(policy: Policy, seed: int, backend: str = "torch") -> Plan:
    counts, choice = step(seed)
    return plan(counts, choice, 0, pad=8, policy=policy, backend=backend, debug=True)


def imbalance(made: Plan) -> float:
    return (made.load.max() / made.load.float().mean()).item()


def test_none_leaves_every_row_at_home() -> None:
    made = planned(NONE, 0)
    assert int(made.moved) == 0 and int(made.replicas.max()) == 0
    assert imbalance(made) > 1.1
    assert made.stride == int(made.ends[:, -1].max())  # known only with the counts
    assert torch.equal(made.send, step(0)[0].view(RANKS, RANKS, -1).sum(2))


def test_fill_is_exact() -> None:
    assert planned(FILL, 0).load.tolist() == [TOKENS * TOP_K] * RANKS


def test_eplb_waits_until_it_has_seen_enough() -> None:
    policy = Eplb(every=2)
    assert int(planned(policy, 0).replicas.max()) == 0
    policy.observe(step(0)[0])
    assert int(planned(policy, 0).replicas.max()) == 0
    policy.observe(step(1)[0])
    made = planned(policy, 2)
    assert made.replicas.tolist() == [2] * RANKS
    assert imbalance(made) < imbalance(planned(NONE, 2))
    policy.observe(step(2)[0])
    assert torch.equal(planned(policy, 2).alloc, made.alloc)


def test_eplb_forgets_what_lies_before_its_last_placement() -> None:
    policy, fresh = Eplb(every=1), Eplb(every=1)
    policy.observe(step(0, "zipf:1.2")[0])
    for each in (policy, fresh):
        each.observe(step(1)[0])
    assert torch.equal(planned(policy, 3).alloc, planned(fresh, 3).alloc)


def test_eplb_splits_the_rows_of_an_expert_evenly() -> None:
    policy = Eplb(every=1, slots=3)
    policy.observe(step(0)[0])
    made = planned(policy, 1)
    for expert in range(EXPERTS):
        rows = made.alloc[:, expert][made.alloc[:, expert] > 0]
        assert rows.max() - rows.min() <= 1
    assert made.replicas.tolist() == [3] * RANKS


def test_eplb_packs_better_when_homes_may_move() -> None:
    counts, found = step(1)[0], {}
    for move in (False, True):
        policy = Eplb(every=1, move_homes=move)
        policy.observe(step(0)[0])
        load = policy(counts, backends.resolve("auto", "cpu", RANKS, EXPERTS // RANKS, TOP_K)).sum(1)
        assert load.sum() == counts.sum()
        found[move] = (load.max() / load.float().mean()).item()
    assert 1 < found[True] < 1.05 < found[False]


def test_placement_by_hand() -> None:
    # Expert 0 is largest until every rank has it; the third copy is expert 2's, on the only rank with room.
    holders = placement([90, 10, 20, 10, 10, 10], ranks=3, slots=1)
    assert holders == [[1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 1, 1]]


def test_placement_keeps_every_expert_somewhere_and_never_twice_on_a_rank() -> None:
    for seed in range(20):
        load = step(seed, "zipf:1.2")[0].sum(0).tolist()
        holders = torch.tensor(placement(load, RANKS, 8, move_homes=True))
        assert holders.sum(0).min() >= 1
        assert holders.max() == 1


def test_experts_are_dealt_like_cards() -> None:
    assert place.dealt(8, 4) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert place.inverse(place.dealt(8, 4)) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert place.blockwise(8, 4) == list(range(8))
    for experts, ranks in ((896, 8), (12, 3), (5, 1), (6, 6)):
        physical = place.dealt(experts, ranks)
        assert [x // (experts // ranks) for x in physical] == [e % ranks for e in range(experts)]
        assert [place.inverse(physical)[x] for x in physical] == list(range(experts))


def test_ranks_must_divide_the_experts() -> None:
    with pytest.raises(ValueError, match="10 experts on 4 ranks: the ranks must divide the experts"):
        place.dealt(10, 4)


def test_check_accepts_an_unbalanced_plan_only_when_told() -> None:
    made = planned(NONE, 0)
    check(made, step(0)[0], balanced=False)
    with pytest.raises(ValueError, match="not its capacity of rows"):
        check(made, step(0)[0])


def test_copies_follow_from_the_loads_that_they_were_placed_by() -> None:
    """What a checkpoint keeps: from it another object, on these ranks or on others, places copies alike."""
    policy = Eplb(every=2, slots=1)
    counts = torch.tensor([[9, 1, 2, 1, 1, 1, 5, 2], [9, 0, 0, 1, 0, 3, 0, 0]])
    policy.memory(2, 8, torch.device("cpu"))
    policy.place()
    assert policy.memory(2, 8, torch.device("cpu"))["holders"].tolist() == [
        [1] * 4 + [0] * 4,
        [0] * 4 + [1] * 4,
    ]
    for _ in range(3):
        policy.observe(counts)
    before = policy.memory(2, 8, torch.device("cpu"))
    for ranks in (2, 4):
        other = Eplb(every=2, slots=1)
        memory = other.memory(ranks, 8, torch.device("cpu"))
        for name in ("loads", "placed", "seen"):
            memory[name].copy_(before[name])
        other.place()
        loads = (2 * counts.sum(0)).tolist()
        assert memory["holders"].tolist() == placement(loads, ranks, 1)
        if ranks == 2:
            assert torch.equal(memory["holders"], before["holders"])
    assert before["holders"].sum() == 10

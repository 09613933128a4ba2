"""Balanced experts over four gloo processes in FP64: equal to a dense layer, equal rows on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.moonep.plan.reference import capacities
from tests.dist.launch import run_workers
from tests.dist.moonep_worker import PLACES, TOP_K

pytestmark = pytest.mark.timeout(300)

BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.03}
EQUAL, UNEQUAL, EMPTY = [10, 10, 10, 10], [17, 3, 9, 4], [12, 0, 7, 0]
ROUTINGS = ("random", "skewed", "duplicates", "one_expert", "one_rank", "idle_rank")
Case = dict[str, Any]


def case(tokens: list[int], routing: str, **options: Any) -> Case:
    return {"tokens": tokens, "routing": routing, **options}


CASES: dict[str, Case] = {
    **{
        f"{name} {routing} {way}": case(tokens, routing, way=way)
        for name, tokens in (("equal", EQUAL), ("unequal", UNEQUAL), ("empty", EMPTY))
        for routing in ROUTINGS
        for way in ("lean", "dispatcher")
    },
    "nobody has a token": case([0, 0, 0, 0], "random"),
    "nobody has a token, dispatcher": case([0, 0, 0, 0], "random", way="dispatcher"),
    "again": case(UNEQUAL, "skewed"),
    "entries": case(UNEQUAL, "skewed", combine="entries"),
    "padded": case(UNEQUAL, "skewed", pad=4),
    "padded dispatcher": case(UNEQUAL, "skewed", pad=4, way="dispatcher"),
    "bfloat16 sums": case(UNEQUAL, "skewed", dtype="bfloat16", combine="sums"),
    "bfloat16 entries": case(UNEQUAL, "skewed", dtype="bfloat16", combine="entries"),
    "float32": case(UNEQUAL, "skewed", dtype="float32"),
    "promised": case(EQUAL, "skewed", equal_tokens=True),
    "recompute": case(UNEQUAL, "skewed", recompute_gate_up=True),
    "checkpoint": case(UNEQUAL, "skewed", way="checkpoint"),
    "checkpoint_again": case(UNEQUAL, "skewed", way="checkpoint_again"),
    "frozen": case(UNEQUAL, "skewed", way="frozen"),
    "frozen recompute": case(UNEQUAL, "idle_rank", way="frozen", recompute_gate_up=True, slots=1),
    "none": case(UNEQUAL, "skewed", policy="none"),
    "none one_rank": case(EQUAL, "one_rank", policy="none"),
    "eplb": case(UNEQUAL, "skewed", policy="eplb"),
    "eplb slots 1": case(EQUAL, "one_rank", policy="eplb", slots=1),
    "none dispatcher": case(EMPTY, "one_expert", policy="none", way="dispatcher"),
    **{
        f"slots {slots} {routing}": case(UNEQUAL, routing, slots=slots)
        for slots in (1, 2)
        for routing in ("skewed", "one_rank", "idle_rank")
    },
    "slots 1 empty": case(EMPTY, "one_rank", slots=1),
    "slots 1 recompute": case(UNEQUAL, "idle_rank", slots=1, recompute_gate_up=True, pad=4),
    "slots 1 checkpoint": case(UNEQUAL, "idle_rank", slots=1, way="checkpoint"),
}


@pytest.fixture(scope="module")
def ran() -> dict[str, list[Any]]:
    """For each case, what every rank answers."""
    args = {"ranks": 4, "cases": list(CASES.values())}
    ranks = run_workers("tests.dist.moonep_worker:layers", 4, args, timeout=150)
    return dict(zip(CASES, map(list, zip(*ranks, strict=True)), strict=True))


def bits(answers: list[Any], name: str = "bits") -> list[str]:
    return [answer[name] for answer in answers]


@pytest.mark.parametrize("name", CASES)
def test_equals_a_dense_layer(ran: dict[str, list[Any]], name: str) -> None:
    for answer in ran[name]:
        bound = BOUNDS[CASES[name].get("dtype", "float64")]
        assert max(answer["differences"].values()) < bound, answer["differences"]


@pytest.mark.parametrize("name", [name for name, each in CASES.items() if "policy" not in each])
def test_every_rank_computes_its_share(ran: dict[str, list[Any]], name: str) -> None:
    tried = CASES[name]
    shares = capacities(sum(tried["tokens"]) * TOP_K, 4)
    passes = 1 + ("recompute_gate_up" in tried or "checkpoint" in tried.get("way", ""))
    for answer, share in zip(ran[name], shares, strict=True):
        rows = sum(answer["rows"])
        if tried.get("pad", 1) == 1:
            assert rows == passes * share
        else:
            assert rows % tried["pad"] == 0
            assert 0 <= rows / passes - share < tried["pad"] * 2 * PLACES


def test_without_balance_one_rank_computes_all(ran: dict[str, list[Any]]) -> None:
    assert [sum(answer["rows"]) for answer in ran["none one_rank"]] == [0, 120, 0, 0]
    assert ran["none one_rank"][0]["stats"]["max_over_mean_after"] == 4.0


def test_copies_placed_by_past_loads_help(ran: dict[str, list[Any]]) -> None:
    stats = ran["eplb slots 1"][0]["stats"]
    assert 1.0 < stats["max_over_mean_after"] < stats["max_over_mean_before"] == 4.0
    assert stats["waves_mean"] > 1


def test_runs_again_bit_for_bit(ran: dict[str, list[Any]]) -> None:
    assert bits(ran["again"]) == bits(ran["unequal skewed lean"])


@pytest.mark.parametrize("name", ["recompute", "checkpoint", "checkpoint_again"])
def test_recompute_leaves_every_bit(ran: dict[str, list[Any]], name: str) -> None:
    assert bits(ran[name]) == bits(ran["unequal skewed lean"])


@pytest.mark.parametrize("routing", ["skewed", "one_rank", "idle_rank"])
@pytest.mark.parametrize("slots", [1, 2])
def test_waves_leave_the_bits_of_rows(ran: dict[str, list[Any]], slots: int, routing: str) -> None:
    """Weight gradients of waves are added wave by wave: equal up to the order of that sum."""
    few, all_at_once = ran[f"slots {slots} {routing}"], ran[f"unequal {routing} lean"]
    assert bits(few, "row_bits") == bits(all_at_once, "row_bits")


def test_waves_are_as_many_on_every_rank(ran: dict[str, list[Any]]) -> None:
    answers = ran["slots 1 idle_rank"]
    assert {answer["stats"]["waves_mean"] for answer in answers} == {3.0}
    assert {answer["stats"]["replicas_max"] for answer in answers} == {3.0}
    assert {answer["stats"]["waves_mean"] for answer in ran["slots 2 idle_rank"]} == {3.0}


def test_stats_tell_what_balancing_did(ran: dict[str, list[Any]]) -> None:
    expert_bytes = 3 * 8 * 6 * 8
    for rank, answer in enumerate(ran["equal one_rank lean"]):
        stats = answer["stats"]
        assert stats["max_over_mean_before"] == 4.0
        assert stats["max_over_mean_after"] == stats["max_over_mean_after_worst"] == 1.0
        assert stats["moved_share"] == 0.75
        assert stats["padding_share"] == 0.0
        assert stats["prefetch_bytes"] % expert_bytes == 0
        assert (stats["prefetch_bytes"] > 0) == (rank != 1)
        assert 0 < stats["rows_sent"] <= stats["entries_sent"]
    assert ran["padded"][0]["stats"]["padding_share"] > 0


def test_a_token_travels_once_to_a_rank(ran: dict[str, list[Any]]) -> None:
    """Shares of 25, 25, 25 and 24: rank 0 keeps 25 of its 51 entries, and sends 25 and 1 of nine tokens."""
    stats = ran["unequal one_expert lean"][0]["stats"]
    assert (stats["entries_sent"], stats["rows_sent"]) == (26, 10)

"""Balanced experts on two GPUs: both transports bring the same, a layer equals a dense one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.launch import run_workers

RANKS, ROUNDS = 2, 50


def _missing() -> str | None:
    if torch.cuda.device_count() < RANKS:
        return "needs two CUDA devices"
    if not torch.cuda.can_device_access_peer(0, 1):
        return "needs two GPUs that reach each other's memory"
    return None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(_missing() is not None, reason=_missing() or ""),
]

WORKER = "tests.gpu.moonep_worker"
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
EQUAL, UNEQUAL, EMPTY = [150, 150], [70, 33], [24, 0]
Case = dict[str, Any]


def case(tokens: list[int], routing: str, dtype: str = "float64", way: str = "lean", **options: Any) -> Case:
    return {"tokens": tokens, "routing": routing, "dtype": dtype, "way": way, **options}


CASES: dict[str, Case] = {
    **{
        f"{routing} {way}": case(UNEQUAL, routing, way=way)
        for routing in ("random", "skewed", "duplicates", "one_expert", "one_rank")
        for way in ("lean", "dispatcher")
    },
    "empty": case(EMPTY, "random"),
    "empty dispatcher": case(EMPTY, "skewed", way="dispatcher"),
    "slots": case(UNEQUAL, "one_rank", slots=1),
    "padded": case(UNEQUAL, "skewed", pad=8),
    "checkpoint": case(UNEQUAL, "skewed", way="checkpoint"),
    "recompute": case(UNEQUAL, "skewed", recompute_gate_up=True),
    "sums": case(UNEQUAL, "skewed", combine="sums"),
    "entries": case(UNEQUAL, "skewed", combine="entries"),
    **{
        f"{dtype} {way}": case(EQUAL, "skewed", dtype, way, equal_tokens=True)
        for dtype in ("float32", "bfloat16")
        for way in ("lean", "dispatcher")
    },
}


@pytest.fixture(scope="module")
def carried() -> list[dict[str, Any]]:
    """What each rank found in random rounds of transfers."""
    return run_workers(f"{WORKER}:transports", RANKS, {"ranks": RANKS, "rounds": ROUNDS}, timeout=240)


@pytest.fixture(scope="module")
def ran() -> dict[str, list[Any]]:
    """For each case, what every rank answers."""
    args = {"ranks": RANKS, "cases": list(CASES.values())}
    answers = run_workers(f"{WORKER}:layers", RANKS, args, timeout=300)
    return dict(zip(CASES, map(list, zip(*answers, strict=True)), strict=True))


def test_auto_takes_peer_memory(carried: list[dict[str, Any]]) -> None:
    for answer in carried:
        assert answer["chosen"] == "peer", answer["reasons"]
        assert answer["reasons"] == {"collective": "slower than peer"}


@pytest.mark.parametrize("transport", ["collective", "small", "large"])
def test_brings_what_was_sent(carried: list[dict[str, Any]], transport: str) -> None:
    """Ragged rows, experts, gradients: bit for bit, with ranks out of step and memory used again."""
    assert [answer[transport] for answer in carried] == [[]] * RANKS


@pytest.mark.parametrize("transport", ["small", "large"])
def test_a_forgotten_transfer_spoils_nothing(carried: list[dict[str, Any]], transport: str) -> None:
    assert [answer["spoilt"][transport] for answer in carried] == [[]] * RANKS


@pytest.mark.parametrize("name", CASES)
def test_equals_a_dense_layer(ran: dict[str, list[Any]], name: str) -> None:
    for answer in ran[name]:
        assert max(answer["distance"].values()) < BOUNDS[CASES[name]["dtype"]], answer["distance"]


@pytest.mark.parametrize("name", CASES)
def test_transports_and_runs_agree_in_every_bit(ran: dict[str, list[Any]], name: str) -> None:
    for answer in ran[name]:
        assert answer["peer"] == answer["peer again"] == answer["collective"]


def test_the_host_waits_for_nothing_but_the_plan() -> None:
    answers = run_workers(f"{WORKER}:quiet", RANKS, {"ranks": RANKS, "tokens": 150}, timeout=120)
    for answer in answers:
        assert len(set(answer["bits"])) == 1

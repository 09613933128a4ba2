"""Memory lent by another process: what is pushed comes back; a lender that dies or has none is noticed."""

from __future__ import annotations

import json
from pathlib import Path

from offload.tiers.sizes import stored_bytes
from tests.dist import peer_tier_worker as worker

from .launch import run_workers, start_workers, stop_workers

WORKER = "tests.dist.peer_tier_worker"


def test_parcels_come_back_from_another_process() -> None:
    borrower, lender = run_workers(f"{WORKER}:borrow", 2, {"capacity": 1 << 20})
    assert borrower["wrong"] == 0 and borrower["where"] == {"peer": 200, "host": 0, "device": 0}
    assert max(map(lambda size: stored_bytes("peer", size), worker.SIZES)) <= borrower["peak"] <= 1 << 20
    assert borrower["describe"] == ["peer: 0.00 GB of shared memory of rank 1"]
    assert borrower["told"] == lender["told"] == [] and lender["files"] == []


def test_what_does_not_fit_goes_to_the_host() -> None:
    borrower, _ = run_workers(f"{WORKER}:borrow", 2, {"capacity": 48 << 10, "host": 1 << 20})
    assert borrower["wrong"] == 0 and borrower["where"]["device"] == 0
    assert borrower["where"]["peer"] > 0 and borrower["where"]["host"] > 0
    assert len(borrower["told"]) == 1 and borrower["told"][0].startswith("the peer tier is full")
    assert "raise offload.peer_gb" in borrower["told"][0]


def test_a_lender_that_is_killed(tmp_path: Path) -> None:
    workers = start_workers(f"{WORKER}:lender_dies", 2, {}, tmp_path)
    try:
        assert workers[0].wait(60) == 0, (tmp_path / "0.out").read_text()
    finally:
        stop_workers(workers)
    answer = json.loads((tmp_path / "0.json").read_text())
    expected = (
        "rank 1, which lends memory to rank 0, has ended, and what was in it is lost; start the run again"
    )
    assert answer["before"] and answer["problem"].startswith(expected)
    assert answer["fetched"].startswith(expected)
    assert (answer["tier"], answer["after"]) == ("host", True)
    assert len(answer["told"]) == 1 and "host takes what would go there" in answer["told"][0]


def test_a_lender_without_memory() -> None:
    borrower, lender = run_workers(f"{WORKER}:cannot_lend", 2)
    assert borrower["where"] == "device"
    for rank in (borrower, lender):
        assert len(rank["told"]) == 1
        assert rank["told"][0].startswith("rank 1 cannot lend 1125899.91 GB: the host has ")
        assert "lower offload.peer_gb" in rank["told"][0]

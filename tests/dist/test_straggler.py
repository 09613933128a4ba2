"""A rank that is slow in a run is named, with its host, when it has been so for long enough."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from k3train.log import events

from . import runs
from .launch import run_workers


def test_a_rank_that_sleeps_in_its_operations_is_named_after_three_reports(tmp_path: Path) -> None:
    # Rank 1 of two that do the same: it is compared with the other, which waits for it outside of operations.
    arguments = runs.overrides(
        runs.prepare_text(tmp_path), tmp_path / "run", "parallel.pipeline=1", "parallel.virtual=1",
        "parallel.data=2", "fault.straggler_ratio=3", "fault.straggler_reports=3", "eval.every=0",
        "checkpoint.every=0", "log=quiet", "log.every=1",
    )  # fmt: skip
    named = {"arguments": arguments, "first": 3, "last": 6}
    assert run_workers("tests.dist.straggler_runs:run", 2, named) == [0, 0]
    told = [event for event in events.read(tmp_path / "run") if event["kind"] == "straggler"]
    assert [event["step"] for event in told] == [5, 7]
    assert told[0]["text"].startswith(f"rank 1 on {socket.gethostname()} is slow in 3 reports in a row, ")
    assert told[1]["text"].startswith(f"rank 1 on {socket.gethostname()} is no longer slow, ")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(
        line["rank_time_slowest"] == 1 and line["rank_time_max_over_median"] > 3 for line in lines[2:6]
    )

"""A rank that is stopped, in its imports or before or behind the meeting of all, is named; all others end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from k3train.exit_status import HUNG
from k3train.log import events

from . import runs
from .launch import start_workers, stop_workers

PLACES = {
    "imports": r"rank 1: no entry",
    "meet": r"rank 1 on \S+: silent since step 0, meet",
    "step": r"rank 1 on \S+: .*step [23].*; rank 0 on \S+: step 3.*(of ranks 0-1|waits for rank 1)",
}


SLOW = [pytest.param(where, marks=pytest.mark.slow) for where in ("imports", "step")]


@pytest.mark.parametrize("where", ["meet", *SLOW])
def test_a_stopped_rank_is_named_with_its_place_and_the_others_end(where: str, tmp_path: Path) -> None:
    arguments = runs.overrides(
        runs.prepare_text(tmp_path), tmp_path / "run", "eval.every=0", "checkpoint.every=0", "log=quiet",
        "fault.hang_seconds=3", "fault.hang_steps=1", "fault.meet_seconds=4", "fault.start_seconds=30",
    )  # fmt: skip
    workers = start_workers("tests.dist.hang_runs:run", 2, {"arguments": arguments, "where": where}, tmp_path)
    try:
        code = workers[0].wait(60)
    finally:
        stop_workers(workers)
    assert code == HUNG, (tmp_path / "0.out").read_text()
    told = json.loads((tmp_path / "run/ranks/hang.json").read_text())["text"]
    assert re.match(rf"hang: no rank has moved for \d+ s; rank 1 looks stuck\. .*{PLACES[where]}", told), told
    (event,) = events.read(tmp_path / "run")
    assert event["kind"] == "hang" and event["text"].startswith(told)
    stacks = (tmp_path / "run/ranks/rank-00000.stacks.txt").read_text()
    assert {"step": "train_step", "meet": "initialize", "imports": "initialize"}[where] in stacks

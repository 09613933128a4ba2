"""Values of `fault` that cannot do what they are meant for are refused, with key and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train.errors import UserError
from launch.compose import ready

BASE = ("recipe=tiny_dense_check",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fault.hang_seconds=-1", "at least 0"),
        ("fault.hang_seconds=nan", "finite"),
        ("fault.hang_seconds=0.5", "use 1 or more, or 0 for no watchdog"),
        ("fault.hang_seconds=600", "parallel.timeout_minutes=10, before a rank is named"),
        ("fault.meet_seconds=0", "at least 1"),
        ("fault.meet_seconds=600", "parallel.timeout_minutes=10, before a rank is named"),
        ("fault.max_restarts=-1", "at least 0"),
        ("fault.straggler_ratio=0.5", "more than 1, or 0 for no report"),
        ("fault.straggler_reports=0", "at least 1"),
        ("fault.health=maybe", "true or false"),
        ("fault.health_slow=1", "1 excluded"),
        ("fault.spike.threshold=3", "at least 4"),
        ("fault.spike.threshold=12", "checkpoint.every=0 makes none on the way"),
        ("fault.spike.steps=0", "at least 1"),
        ("fault.spike=12", "is a section"),
        ("fault.hang_second=3", "did you mean fault.hang_seconds?"),
    ],
)
def test_refused_in_one_line(given: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        ready([*BASE, f"run.dir={tmp_path}/run", "checkpoint.every=0", given])
    text = str(refusal.value)
    assert text.startswith(given.partition("=")[0]) and said in text and "\n" not in text


@pytest.mark.parametrize(
    "given",
    [
        ("fault.hang_seconds=0", "fault.meet_seconds=6000"),
        ("fault.hang_seconds=900", "parallel.timeout_minutes=20"),
        ("fault.max_restarts=0", "fault.straggler_ratio=0"),
        ("fault.spike.threshold=12", "checkpoint.every=2"),
    ],
)
def test_taken(given: tuple[str, ...], tmp_path: Path) -> None:
    config = ready([*BASE, f"run.dir={tmp_path}/run", *given])
    assert config.fault.spike.threshold in (None, 12.0)

"""The model that is trained is the one that is released."""

from __future__ import annotations

from tests.dist.launch import run_workers


def test_forward_is_that_of_the_weights_on_their_grid() -> None:
    (found,) = run_workers("tests.unit.quant.workers:compare_with_rounded_weights", 1)
    assert found == {
        "rounded weights change nothing": True,
        "a plain model of them": True,
        "another model": False,
    }

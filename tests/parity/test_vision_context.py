"""Whole training steps with images over a context group against one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.test_layouts import SEEING, Run, assert_close, run


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(1, SEEING, tmp_path_factory.mktemp("parity") / "single_seeing")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ["parallel.context=2", "vision.mode=inline"]),
        (4, ["parallel.context=2", "parallel.pipeline=2", "offload.sites={vit.layer: recompute}"]),
        (4, ["parallel.context=4", "offload.sites={vit.core: recompute}"]),
    ],
    ids=["cp2", "cp2_pp2_recompute", "cp4_recompute"],
)
def test_images_over_a_context_group_stay_within_bound(
    ranks: int, layout: list[str], single: Run, tmp_path: Path
) -> None:
    reports, tensors = run(ranks, [*SEEING, *layout], tmp_path / "run")
    assert_close(reports, tensors, single, ("gradients", "weights"))
    names = {name for name in tensors["gradients"] if name.startswith("vision.")}
    assert len(names) == 18 and all(len(tensors["gradients"][name]) == ranks for name in names)

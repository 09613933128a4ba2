"""Wherever saved tensors lie, and whatever is computed again: training does not change by a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3train import activation_sites
from tests.dist.launch import run_workers

pytestmark = pytest.mark.timeout(600)

VIRTUAL = ["parallel.pipeline=2", "parallel.virtual=2", "parallel.layers_per_chunk=[1,3,1,1]"]
LAYOUTS = {
    "pipeline 2 x virtual 2": (2, [*VIRTUAL, "run.microbatches=4"]),
    "vision in bubbles": (2, [*VIRTUAL, "vision=tiny", "data.images=[digits]", "run.microbatches=4"]),
    "expert 2": (2, ["parallel.expert.size=2", "run.microbatches=2"]),
    "balanced expert 2": (
        2,
        ["parallel.expert.size=2", "run.microbatches=2", "parallel.expert.dispatcher=moonep"],
    ),
    "context 2": (2, ["parallel.context=2", "run.microbatches=2"]),
    "zero 2": (2, ["parallel.data=2", "parallel.virtual=3", "run.microbatches=2", "parallel.zero=2"]),
    "data 2 x pipeline 2 x virtual 2": (4, [*VIRTUAL, "parallel.data=2", "run.microbatches=4"]),
}
SLOW = {"data 2 x pipeline 2 x virtual 2", "expert 2"}
SMALLEST = ["offload.min_kib=0", "offload.inflight_mib=1"]
PEER = ["offload.policy=peer", "offload.peer_gb=0.1"]
Answer = dict[str, Any]


def random_policy(seed: int, disk: Path, tiers: tuple[str, ...]) -> list[str]:
    """Some storage for every site."""
    random = np.random.default_rng(seed)
    plain = ("keep", *tiers)
    rules = {}
    for site in activation_sites.SITES:
        again = site.is_region and random.random() < 0.4
        storage = str(random.choice(plain))
        rules[site.name] = "+".join(
            [*["recompute"][:again], *([storage] if storage != "keep" or not again else [])]
        )
    text = ",".join(f"{name}:{storage}" for name, storage in rules.items())
    sizes = ["offload.host_gb=0.2", "offload.nvme_gb=0.2", "offload.peer_gb=0.2", f"offload.nvme_dir={disk}"]
    return [f"offload.sites={{{text}}}", *sizes, *SMALLEST]


@pytest.mark.parametrize("dispatcher", ["alltoall", "moonep"])
def test_ranks_run_the_same_collectives_again_whatever_each_has_saved(dispatcher: str) -> None:
    """The threshold lies among the sizes of the rows that experts get, which differ from rank to rank."""
    layout = ["parallel.expert.size=2", "run.microbatches=2", f"parallel.expert.dispatcher={dispatcher}"]
    layout += ["model.num_dense_layers=0", "data.micro_batch_size=1"]
    thresholds = [["offload.policy=recompute", f"offload.min_kib={size}"] for size in (18, 19, 20, 21, 22)]
    args = {"layout": layout, "policies": [["offload.policy=keep"], *thresholds], "steps": 1}
    for kept, *others in run_workers("tests.dist.activations_worker:run", 2, args, timeout=90):
        assert all(found["reports"] == kept["reports"] for found in others)


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in LAYOUTS]
)
def test_no_policy_changes_a_bit(layout: str, tmp_path: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    piped = "parallel.pipeline=2" in overrides
    tiers = ("host", "nvme", "peer") if piped else ("host", "nvme")
    policies = [
        ["offload.policy=host", *SMALLEST],
        ["offload.policy=recompute", "offload.recompute_layers=2", "offload.min_kib=0"],
        ["offload.policy=selective", "offload.min_kib=0"],
        *([[*PEER, *SMALLEST]] if piped else []),
        *(random_policy(seed, tmp_path, tiers) for seed in range(4)),
    ]
    args = {"layout": overrides, "policies": [["offload.policy=keep"], *policies], "steps": 2}
    said: list[list[Answer]] = run_workers("tests.dist.activations_worker:run", ranks, args, timeout=400)
    for kept, *others in said:
        for policy, found in zip(policies, others, strict=True):
            assert found["reports"] == kept["reports"], policy
            assert found["parameters"] == kept["parameters"], policy
            assert not any(found["left"].values()), (policy, found["left"])
    assert not list(tmp_path.iterdir()), "files are nameless"

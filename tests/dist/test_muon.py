"""Per-Head Muon over shards: the same bits as with whole states, and no more bytes than its plan says."""

from __future__ import annotations

from typing import Any

import pytest

from k3train.layout import layout_of
from k3train.memory import stage_of
from k3train.optim.groups import split
from k3train.optim.layout import module_order, muon_traffic
from k3train.schedule import layer_cuts
from k3train.shapes import compact_parameters
from launch.compose import compose, resolve_layout
from tests.parity.worker import SMALL

from .launch import run_workers

LAYOUTS = {
    "data 2": (2, ["parallel.data=2", "run.microbatches=2"]),
    "expert 2 x data 4": (4, ["parallel.data=4", "parallel.expert.size=2", "run.microbatches=1"]),
    "pipeline 2 x virtual 2 x data 2": (
        4,
        ["parallel.pipeline=2", "parallel.virtual=2", "parallel.data=2", "run.microbatches=2"],
    ),
}


def two_steps(layout: str, *overrides: str, worth_sending: float | None = None) -> list[dict[str, Any]]:
    world_size, chosen = LAYOUTS[layout]
    args = {"overrides": [*chosen, *overrides], "worth_sending": worth_sending}
    return run_workers("tests.dist.muon_worker:two_steps", world_size, args)


def planned(layout: str) -> tuple[list[list[list[str]]], list[dict[str, int]]]:
    """Names of each chunk in the order of its modules, and bytes of the busiest rank, by pipeline rank."""
    world_size, chosen = LAYOUTS[layout]
    config = resolve_layout(compose([*SMALL, "optim=muon_per_head", *chosen]), world_size)
    topology = layout_of(config, world_size)
    cuts = layer_cuts(config, topology)
    names, traffic = [], []
    for rank in range(topology.pipeline):
        stages = [rank + topology.pipeline * chunk for chunk in range(topology.virtual)]
        chunks = [
            [each for each in compact_parameters(config.model) if stage_of(each, cuts) == stage]
            for stage in stages
        ]
        names.append([[e.name for e in module_order(chunk) if e.trainable] for chunk in chunks])
        traffic.append(muon_traffic(config, topology, chunks, first=rank == 0))
    return names, traffic


def without_numbers(names: list[str]) -> list[str]:
    """Experts as the plan has them: one name for all, where its first one stands."""
    found = (name.split(".experts.") for name in names)
    return list(
        dict.fromkeys(
            ".experts.{expert}.".join([head, tail[0].partition(".")[2]]) if tail else head
            for head, *tail in found
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_change_no_bit_and_send_what_is_planned(layout: str) -> None:
    whole, shards = two_steps(layout, "parallel.zero=0"), two_steps(layout, "parallel.zero=1")
    for one, other in zip(whole, shards, strict=True):
        assert one["weights"] == other["weights"]
        assert all(sent == {"muon_gather": 0, "muon_return": 0} for sent in one["sent"])
    names, traffic = planned(layout)
    ranks = len(shards) // len(names)
    for stage, (order, expected) in enumerate(zip(names, traffic, strict=True)):
        found = shards[stage * ranks : (stage + 1) * ranks]
        assert [without_numbers(chunk) for chunk in found[0]["names"]] == order
        parts = list(zip(*(each["sent"] for each in found), strict=True))
        for name, size in expected.items():
            assert sum(max(sent[name] for sent in part) for part in parts) == size, name
        gathered = sum(sent["muon_gather"] for each in found for sent in each["sent"])
        # Gathering the whole buffer would bring each rank all that it does not hold.
        naive = sum(each["buffer_bytes"] for each in found) * (ranks - 1) // ranks
        assert 0 < gathered < naive / 4


def test_blocks_that_leave_their_rank_come_back_right() -> None:
    """With sending for nothing, the ranks share the work evenly, whoever holds the matrices."""
    at_home, spread = two_steps("data 2"), two_steps("data 2", worth_sending=0)
    assert [each["weights"] for each in at_home] == [each["weights"] for each in spread]
    sent = [sum(part["muon_gather"] for each in run for part in each["sent"]) for run in (at_home, spread)]
    assert sent[1] > sent[0]


def test_each_block_has_one_owner() -> None:
    found = two_steps("data 2")
    config = resolve_layout(compose([*SMALL, "optim=muon_per_head"]), 1)
    cuts = [(entry, split(entry, config.model)) for entry in compact_parameters(config.model)]
    expected = sum(len(cut.heights) * cut.times * entry.copies for entry, cut in cuts if cut is not None)
    assert sum(each["blocks"] for each in found) == expected

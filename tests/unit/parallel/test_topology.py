"""Which rank plays which part, against megatron-core's own generator of ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.topology import LayoutError, Topology, split_layers

LAYOUTS = [
    Topology(),
    Topology(pipeline=2, virtual=3),
    Topology(data=4, expert=2),
    Topology(pipeline=2, data=4, expert=4),
    Topology(pipeline=2, context=2, data=2, expert=4),
    Topology(pipeline=3, context=2, data=4, expert=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_are_those_of_megatron_core(layout: Topology) -> None:
    from parallel.cpu import enable_cpu

    enable_cpu()
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=1, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order=order)
    expert = RankGenerator(
        tp=1, ep=layout.expert, dp=layout.expert_data, pp=layout.pipeline, cp=1, order=order
    )
    wanted = {
        "pipeline": dense.get_ranks("pp"),
        "data": dense.get_ranks("dp"),
        "context": dense.get_ranks("cp"),
        "expert": expert.get_ranks("ep"),
        "expert_data": expert.get_ranks("dp"),
    }
    assert {kind: layout.groups(kind) for kind in wanted} == {
        kind: sorted(groups) for kind, groups in wanted.items()
    }


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    layout = Topology(pipeline=2, context=2, data=4, expert=4)
    assert layout.world_size == 16
    for kind in ("pipeline", "data", "context", "expert", "expert_data"):
        assert sorted(rank for group in layout.groups(kind) for rank in group) == list(range(16))


def test_coordinates_of_a_rank() -> None:
    layout = Topology(pipeline=2, context=2, data=4, expert=4)
    assert layout.coordinates(13) == {"pipeline": 1, "data": 2, "context": 1, "expert": 1, "expert_data": 1}


def test_forward_pass_walks_all_ranks_once_for_each_chunk() -> None:
    layout = Topology(pipeline=3, virtual=2)
    assert list(layout.stages()) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [layout.stage_of(*place) for place in layout.stages()] == list(range(layout.num_chunks))


def test_remainder_goes_to_the_first_chunks() -> None:
    assert split_layers(9, 4) == [range(0, 3), range(3, 5), range(5, 7), range(7, 9)]


def test_explicit_cut() -> None:
    assert split_layers(9, 4, [1, 4, 3, 1]) == [range(0, 1), range(1, 5), range(5, 8), range(8, 9)]


@given(st.integers(1, 200), st.integers(1, 40))
def test_cuts_cover_the_layers_evenly_or_are_refused(num_layers: int, num_chunks: int) -> None:
    if num_layers < num_chunks:
        with pytest.raises(LayoutError, match="leave a chunk empty"):
            split_layers(num_layers, num_chunks)
        return
    cuts = split_layers(num_layers, num_chunks)
    assert [layer for cut in cuts for layer in cut] == list(range(num_layers))
    assert len(cuts) == num_chunks
    assert max(map(len, cuts)) - min(map(len, cuts)) <= 1


@pytest.mark.parametrize(
    ("explicit", "message"),
    [([4, 4], "names 2 chunks of 3"), ([5, 4, 0], "chunk empty"), ([3, 3, 2], "adds up to 8, not 9")],
)
def test_impossible_cuts_are_refused(explicit: list[int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        split_layers(9, 3, explicit)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline": 0}, "parallel.pipeline=0"),
        ({"expert": 4, "data": 2}, "parallel.expert.size=4 must divide data x context = 2"),
    ],
)
def test_impossible_layouts_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Topology(**sizes)


def test_planning_imports_no_torch() -> None:
    code = "import sys, parallel.topology; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"

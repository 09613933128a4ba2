"""Layout arithmetic against megatron-core's own rank generator."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.topology import LayoutError, Topology, split_layers

ROOT = Path(__file__).resolve().parents[3]

LAYOUTS = [
    {"pipeline": pipeline, "context": context, "data": data, "expert": expert}
    for pipeline, context, data, expert in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 4))
    if (data * context) % expert == 0
]

# As initialize_model_parallel builds them: dense ranks with expert size 1, expert ranks without context.
MEGATRON = """
import json, sys
from parallel.cpu import enable_cpu
enable_cpu()
from megatron.core.parallel_state import RankGenerator
order = "tp-cp-ep-dp-pp"
answers = []
for layout in json.loads(sys.argv[1]):
    pp, cp, dp, ep = (layout[name] for name in ("pipeline", "context", "data", "expert"))
    dense = RankGenerator(tp=1, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=1, ep=ep, dp=dp * cp // ep, pp=pp, cp=1, order=order)
    answers.append({
        "pipeline": dense.get_ranks("pp"), "data": dense.get_ranks("dp"), "context": dense.get_ranks("cp"),
        "expert": expert.get_ranks("ep"), "expert_data": expert.get_ranks("dp"),
    })
print(json.dumps(answers))
"""


def test_groups_equal_megatron_core() -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEGATRON, json.dumps(LAYOUTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for layout, expected in zip(LAYOUTS, json.loads(result.stdout), strict=True):
        topology = Topology(**layout)
        for kind, ranks in expected.items():
            assert topology.groups(kind) == sorted(ranks), (layout, kind)


def test_coordinates_find_every_rank_its_group() -> None:
    topology = Topology(pipeline=2, context=2, data=2, expert=4)
    assert topology.world_size == 8
    assert topology.coordinates(6) == {
        "pipeline": 1, "data": 1, "context": 0, "expert": 2, "expert_data": 0
    }  # fmt: skip
    assert topology.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.groups("expert") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_stages_walk_the_pipeline_once_per_chunk() -> None:
    topology = Topology(pipeline=3, virtual=2)
    assert list(topology.stages()) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [topology.stage_of(rank, chunk) for rank, chunk in topology.stages()] == list(range(6))


def test_split_layers() -> None:
    assert split_layers(9, 4) == [range(0, 3), range(3, 5), range(5, 7), range(7, 9)]
    assert split_layers(5, 2, [2, 3]) == [range(0, 2), range(2, 5)]
    for explicit, message in (
        ([5], "names 1 chunks of 2"),
        ([5, 0], "empty"),
        ([2, 2], "adds up to 4, not 5"),
    ):
        with pytest.raises(LayoutError, match=message):
            split_layers(5, 2, explicit)
    with pytest.raises(LayoutError, match="empty"):
        split_layers(2, 3)


def test_refuses_impossible_sizes() -> None:
    with pytest.raises(LayoutError, match=r"parallel\.expert=3 must divide data x context = 4"):
        Topology(data=4, expert=3)
    with pytest.raises(LayoutError, match=r"parallel\.pipeline=0; use 1 or more"):
        Topology(pipeline=0)

"""Layouts built rank by rank without values or peers, whole and deliberately broken."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from k3train import rehearsal_rank
from k3train.config import Config
from k3train.layout import layout_of
from k3train.rehearsal import Result, rehearse, usual_ranks
from k3train.shapes import compact_parameters
from launch import cli
from launch.compose import ready_stages

PLAIN = ("recipe=tiny", "vision=none", "data.images=[]", "optim=adamw")
LAYOUTS = {
    "pipeline, experts": ("parallel=pp2_vpp2_ep2",),
    "uneven cut, data": ("parallel=pp2", "parallel.layers_per_chunk=[4,5]", "parallel.data=2"),
    "context, virtual": ("parallel=pp2_vpp2", "parallel.context=2"),
    "balanced experts": ("parallel.expert.size=4", "parallel.data=4", "parallel.expert.dispatcher=moonep"),
    "shards of gradients": ("parallel=pp2_vpp2", "parallel.data=2", "parallel.zero=2"),
    "blocks of Muon": ("optim=muon_per_head", "parallel.pipeline=2", "parallel.data=4"),
    "images": ("vision=tiny", "data.images=[digits]", "parallel.pipeline=2", "parallel.data=2"),
}


def resolved(*overrides: str) -> Config:
    return ready_stages([*PLAIN, *overrides], inputs=False, from_start=True)[-1]


def all_ranks(*overrides: str) -> Result:
    config = resolved(*overrides)
    return rehearse(config, range(layout_of(config).world_size), processes=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_whole(name: str) -> None:
    result = all_ranks(*LAYOUTS[name])
    assert result.problems == []
    assert len(result.built) == result.topology.world_size
    model = sum(entry.numel for entry in compact_parameters(resolved(*LAYOUTS[name]).model))
    assert result.elements > model, "checkpoints hold at least masters or moments beside the model"


def problems(*overrides: str) -> list[str]:
    return [str(problem) for problem in all_ranks(*overrides).problems]


def test_a_wrong_cut_names_rank_and_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    build = rehearsal_rank.build_trainer

    def shifted(config: Config, groups: Any) -> Any:
        if groups.rank == 1:
            config = replace(config, parallel=replace(config.parallel, layers_per_chunk=[4, 5]))
        return build(config, groups)

    monkeypatch.setattr(rehearsal_rank, "build_trainer", shifted)
    found = problems("parallel=pp2", "parallel.layers_per_chunk=[5,4]")
    assert any("rank 1" in line and "stage 1" in line and "layers 4-8" in line for line in found), found
    assert any("parameters" in line for line in found)


def test_a_wrong_group_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rehearsal_rank._groups

    def astray(made: Any) -> Any:
        facts = own(made)
        if facts.rank != 2:
            return facts
        return replace(facts, groups={**facts.groups, "expert": (0, 2)})

    monkeypatch.setattr(rehearsal_rank, "_groups", astray)
    found = problems("parallel.expert.size=2", "parallel.data=4")
    assert any("rank 2" in line and "expert group" in line and "0, 2" in line for line in found), found
    assert all("rank 2" in line for line in found if "expert group" in line)


def test_an_entry_that_two_ranks_save_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal_rank, "is_main_replica", lambda replica: True)
    found = problems("parallel.data=2")
    assert "rank 1: model.embedding.weight: both rank 0 and rank 1 save [0, 0]" in found


def test_what_cannot_be_built_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    build = rehearsal_rank.build_trainer

    def fails(config: Config, groups: Any) -> Any:
        if groups.rank == 3:
            raise AssertionError("no such layer\nand more")
        return build(config, groups)

    monkeypatch.setattr(rehearsal_rank, "build_trainer", fails)
    found = problems("parallel=pp2_vpp2", "parallel.data=2")
    (line,) = [line for line in found if "no such layer" in line]
    assert "rank 3" in line and "pipeline place 1" in line and "\n" not in line


def test_the_verb_says_what_it_built_and_refuses_what_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["plan", "--rehearse", *PLAIN, "parallel=pp2_vpp2_ep2"]
    assert cli.main([*arguments, "--json", "ranks=0,2-3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == []
    for wrong, said in (("rank=4", "0 to 3"), ("ranks=3-1", "0 to 3"), ("rank=1,2", "takes a number")):
        assert cli.main([*arguments, wrong]) == 2
        error = capsys.readouterr().err
        assert wrong.partition("=")[0] in error and said in error and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_rank_of_a_thousand() -> None:
    """The whole of Kimi K3 on 1,024 ranks: pipeline 8 x virtual 2, experts over 128."""
    config = ready_stages(["recipe=k3_pretrain"], inputs=False, from_start=True)[-1]
    result = rehearse(config, range(1024))
    assert [str(problem) for problem in result.problems] == []
    assert len(result.built) == 1024


def test_ends_of_every_stage_of_a_thousand_ranks() -> None:
    """The groups of all 1,024, and everything of two ranks of each stage, with four of its layers a stage."""
    config = ready_stages(
        [
            "recipe=k3_pretrain",
            "model.num_layers=33",
            "model.num_experts=128",
            "parallel.layers_per_chunk=null",
        ],
        inputs=False,
        from_start=True,
    )[-1]
    chosen = usual_ranks(layout_of(config))
    result = rehearse(config, chosen)
    assert [str(problem) for problem in result.problems] == []
    assert len(result.facts) == 1024 and [facts.rank for facts in result.built] == chosen

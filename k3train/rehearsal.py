"""A run of any size, built rank by rank on this machine without values: a wrong cut or group fails here.

Every rank's groups, model chunks, gradient buffers, optimizer shards, transfers and checkpoint entries come
from the code that a run builds them with (`train.assemble`), on torch's meta device and over process groups
without peers. What ranks say of themselves is then compared among them and with the plan.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain

from parallel.topology import Topology

from . import memory
from . import rehearsal_checks as checks
from .config import Config
from .layout import layout_of
from .optim.groups import moments
from .rehearsal_facts import Problem, RankFacts
from .rehearsal_rank import groups_of, on_device, rank_of
from .schedule import layer_cuts, pipeline_table, row_plan
from .shapes import compact_parameters

SHARE = 16
"""Ranks that a process builds at a time."""
LEDGER = ("parameters", "gradients", "gradient_slots", "master_weights", "optimizer_states", "vision_states")


@dataclass(frozen=True)
class Result:
    """What was found."""

    topology: Topology
    facts: list[RankFacts]
    """Of every rank that could be built."""
    planned: list[dict[str, int]]
    """The ledger's states by pipeline place."""
    problems: list[Problem]
    elements: int
    """Of the model's tensors, each of which one rank saves."""

    @property
    def built(self) -> list[RankFacts]:
        """Ranks of which more than the groups was built."""
        return [facts for facts in self.facts if facts.built]


def usual_ranks(topology: Topology) -> list[int]:
    """The first and the last rank of each pipeline stage: they differ in all coordinates that there are."""
    stages = topology.world_size // topology.pipeline
    return sorted({stages * stage + at for stage in range(topology.pipeline) for at in (0, stages - 1)})


def rehearse(
    config: Config,
    ranks: Iterable[int],
    *,
    processes: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """Build the given ranks of a resolved and validated configuration, and of all others the groups.

    Args:
        processes: that build at the same time; as many as there are CPUs when left out.
        progress: told how many ranks are done.
    """
    _posted.clear()
    config = on_device(config)
    topology, chosen = layout_of(config), set(ranks)
    everyone = sorted(chosen) + [rank for rank in range(topology.world_size) if rank not in chosen]
    found: list[RankFacts] = []
    problems: list[Problem] = []
    coverage = checks.Coverage(config)
    for done, outcome in enumerate(_outcomes(config, everyone, chosen, processes), 1):
        if isinstance(outcome, Problem):
            problems.append(outcome)
        else:
            coverage.add(outcome)
            found.append(replace(outcome, saved=()))
        progress(done)
    found.sort(key=lambda facts: facts.rank)
    planned = _ledger(config, topology)
    built = [facts for facts in found if facts.built]
    if found:
        problems += _compare(config, topology, planned, found, built)
    problems += coverage.check(complete=len(built) == topology.world_size)
    return Result(topology, found, planned, problems, coverage.elements())


def _compare(
    config: Config,
    topology: Topology,
    planned: list[dict[str, int]],
    found: list[RankFacts],
    built: list[RankFacts],
) -> Iterator[Problem]:
    cuts = layer_cuts(config, topology)
    even = len({moments(entry, config) for entry in compact_parameters(config.model)}) == 1
    return chain(
        checks.groups_agree(topology, found),
        checks.same_calls(found),
        checks.cuts_agree(config, topology, cuts, row_plan(config, topology, cuts), built),
        checks.parameters_add_up(config, topology, built),
        checks.ledger_holds(topology, planned, built, even=even),
        checks.experts_divide(config, topology, built),
        checks.trades_meet(built),
        checks.transfers_meet(topology, built),
        checks.samples_divide(config, topology, built),
    )


def _ledger(config: Config, topology: Topology) -> list[dict[str, int]]:
    """The plan's states by pipeline place."""
    cuts, table = layer_cuts(config, topology), pipeline_table(config, topology)
    ledgers = memory.rank_memory(config, topology, cuts, table, row_plan(config, topology, cuts))
    return [{kind: ledger[kind] for kind in LEDGER if kind in ledger} for ledger in ledgers]


def _outcomes(
    config: Config, everyone: Sequence[int], chosen: set[int], processes: int | None
) -> Iterator[RankFacts | Problem]:
    """Of each rank, built in this process or, where there are many, in several."""
    workers = processes or len(os.sched_getaffinity(0))
    shares = [everyone[first : first + SHARE] for first in range(0, len(everyone), SHARE)]
    if workers < 2 or len(shares) < 2:
        yield from chain.from_iterable(_share(config, share, chosen) for share in shares)
        return
    # Torch is imported here and has started no thread yet: a copy of this process is ready at once.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(workers, len(shares)), context) as pool:
        pending = [pool.submit(_share, config, share, chosen) for share in shares]
        for done in pending:
            yield from done.result()


_posted: set[int] = set()
"""Pipeline places of which this process has planned the transfers."""


def _share(config: Config, ranks: Sequence[int], chosen: set[int]) -> list[RankFacts | Problem]:
    return [_attempt(config, rank, built=rank in chosen) for rank in ranks]


def _attempt(config: Config, rank: int, *, built: bool) -> RankFacts | Problem:
    place = layout_of(config).coordinates(rank)["pipeline"]
    try:
        if not built:
            return groups_of(config, rank)
        facts = rank_of(config, rank, posts=place not in _posted)
        _posted.add(place)
        return facts
    except Exception as error:
        text = str(error).strip().splitlines()
        return Problem(rank, f"pipeline place {place}", f"{type(error).__name__}: {text[0] if text else ''}")

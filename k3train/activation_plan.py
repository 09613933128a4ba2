"""The cheapest policy for a budget of device memory, and the room that tiers need. Needs no torch.

For one set of regions that are run again, what every site holds is known, and how each is held is searched
exactly (`activation_search`). The sets are searched from cheap to dear, by seconds for each byte that they
save, then by adding and leaving out one region or two while that helps; whole layers that are run again are
sets of their own. Added time is that of the slowest pipeline rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from offload.policy import TIERS, Storage
from parallel.pipeline.table import BACKWARD, FORWARD, WEIGHT, Table
from parallel.topology import Topology

from .activation_ledger import SPARE, Sizes, build_stages
from .activation_ledger import stages as stages_of
from .activation_policy import (
    BUDGET,
    LAYER,
    MTP_LAYER,
    TOWER_LAYER,
    lender,
    peers_meet,
    policy_of,
    with_storage,
)
from .activation_search import Answer, Option, Problem, search
from .activation_sites import sites
from .activation_time import WHOLE_LAYERS, coding_seconds, rates, region_seconds, window_seconds
from .config import Config
from .errors import UserError
from .memory import Parts, rank_activations, rank_memory, tier_capacities
from .microbatch import element_bytes
from .schedule import layer_cuts, row_plan, simulation, step_parts
from .stage_time import base_costs

ACTIVATION_KINDS = ("activations", "attn_res_bank", "activations_fp8", "offload_windows", "lent_to_peers")
QUICK, THOROUGH = 0, 5000
"""Partial choices that are looked at for one set among many, and for the best one."""
MOST_SETS = 100
"""Sets of regions that are looked at with the same whole layers: some seconds for the largest models."""
LEAST_SPARE = 64 << 20
"""Bytes of a tier beyond what is planned."""


@dataclass(frozen=True)
class TierPlan:
    """Room that a pipeline rank needs outside its own memory, and gives, in bytes."""

    capacities: dict[str, int]
    """By tier; the host has room for what another tier may fail to take."""
    lender: int | None
    """The pipeline rank whose memory is tier `peer`."""
    lends: int


def tier_plan(config: Config, topology: Topology) -> list[TierPlan]:
    """By pipeline rank; what `offload.*_gb` says comes before what is planned."""
    simulated = simulation(config, topology)
    table, parts = simulated.timeline.table, step_parts(simulated)
    cuts = layer_cuts(config, topology)
    rows = row_plan(config, topology, cuts, vee=table.layout.vee)
    held = rank_activations(config, table, stages_of(config, cuts, rows), parts)
    given = tier_capacities(config)
    capacities = [
        {name: int(given.get(name, size * SPARE + LEAST_SPARE)) for name, size in part.tiers.items()}
        for part in held
    ]
    found = []
    stand_in = config.offload.on_failure == "fallback" and config.offload.host_gb is None
    for rank, own in enumerate(capacities):
        if own and stand_in:
            own["host"] = sum(own.values())
        borrower = len(held) - 1 - rank
        lends = capacities[borrower].get("peer", 0) if lender(borrower, len(held)) == rank else 0
        found.append(TierPlan(own, lender(rank, len(held)) if "peer" in own else None, lends))
    return found


class Case(NamedTuple):
    """Which whole layers are run again."""

    layer: bool
    mtp: bool


@dataclass(frozen=True)
class Solved:
    """A policy for a budget."""

    storages: dict[str, str]
    """Of every site that holds something."""
    seconds: float
    """Added to the step of the slowest rank, beside copies that are hidden."""
    bound: float
    """With the same regions run again, no policy adds less."""


@dataclass(frozen=True)
class _Tried:
    """A set of regions, and the best way to hold the rest."""

    over: float
    """Bytes by which nothing fits; 0 where something does."""
    seconds: float
    storages: dict[str, Storage]
    bound: float = 0.0

    @property
    def rank(self) -> tuple[float, float]:
        return self.over, self.seconds


def with_budget(config: Config, topology: Topology) -> Config:
    """The configuration with the policy that its budget finds. Raises UserError: nothing fits."""
    variants = [config]
    if config.vision.enabled and policy_of(config).pattern(TOWER_LAYER) is None:
        variants = [_changed(config, {TOWER_LAYER: how}) for how in ("keep", "recompute")]
    best: tuple[Solved, Config] | None = None
    least = math.inf
    for variant in variants:
        solver = _Solver(variant, topology)
        found = solver.solve()
        least = min(least, solver.least)
        if found is not None and (best is None or found.seconds < best[0].seconds):
            best = found, variant
        if best is not None and best[0].seconds == 0:
            break
    if best is None:
        raise UserError(_refusal(config, solver.choices, least))
    solved, variant = best
    changed = _changed(variant, solved.storages)
    changed.offload.policy = BUDGET
    return changed


def _changed(config: Config, storages: Mapping[str, str]) -> Config:
    return replace(config, offload=replace(config.offload, resolved=with_storage(config, storages)))


def _refusal(config: Config, tried: Sequence[str], least: float) -> str:
    allowed = config.offload.allow
    more = ["offload.allow with fp8 may halve what is held"] if "fp8" not in allowed else []
    more += ["nvme needs offload.nvme_dir"] if "nvme" in allowed and not config.offload.nvme_dir else []
    # Rounded up, so that what is named is enough.
    needed = f"the least is about {math.ceil(least / 1e7) / 100:.2f} GB"
    return "; ".join(
        [
            f"offload.budget_gb={config.offload.budget_gb:g}: nothing fits with "
            f"{', '.join(tried) or 'keep alone'}: {needed}",
            *more,
        ]
    )


class _Solver:
    """What does not change between the sets that are tried."""

    def __init__(self, config: Config, topology: Topology) -> None:
        assert config.offload.budget_gb is not None
        self.config, self.topology = config, topology
        self.policy, self.allowed = policy_of(config), set(config.offload.allow)
        self.cuts = layer_cuts(config, topology)
        simulated = simulation(config, topology)
        self.table, parts = simulated.timeline.table, step_parts(simulated)
        self.layout = self.table.layout
        self.rows = row_plan(config, topology, self.cuts, vee=self.layout.vee)
        self.forward, self.backward = base_costs(config, topology, self.cuts, layered=False)
        self.regions = region_seconds(config, self.cuts)
        self.again = self._layer_seconds()
        self.static = self._static(parts)
        self.budget = config.offload.budget_gb * 1e9
        self.counts = [_counts(self.table, rank) for rank in range(self.layout.pipeline)]
        self.tiers = self._tiers()
        self.least = math.inf

    def solve(self) -> Solved | None:
        """The best policy of all cases."""
        best: _Tried | None = None
        for case in self._cases():
            found = _CaseSolver(self, case).solve(best)
            if best is None or found.rank < best.rank:
                best = found
            if best.rank == (0.0, 0.0):
                break
        if best is None or best.over > 0:
            return None
        return Solved({site: str(each) for site, each in best.storages.items()}, best.seconds, best.bound)

    def fixed(self, site: str) -> Storage | None:
        """What the user said of a site."""
        return None if self.policy.pattern(site) is None else self.policy.storage(site)

    def _cases(self) -> Iterable[Case]:
        choices = []
        for site in (LAYER, MTP_LAYER):
            fixed = self.fixed(site)
            if site == MTP_LAYER and not self.config.model.mtp_layers:
                choices.append([False])
            elif fixed is not None:
                choices.append([fixed.recompute])
            else:
                choices.append([False, True] if "recompute" in self.allowed else [False])
        return [Case(layer, mtp) for layer in choices[0] for mtp in choices[1]]

    def _static(self, parts: Parts) -> list[float]:
        """What each rank holds whatever the policy, the tower's part among it."""
        kept = _changed(self.config, {"*": "keep"})
        kept.offload.sites = {TOWER_LAYER: str(self.policy.storage(TOWER_LAYER))}
        ledgers = rank_memory(kept, self.topology, self.cuts, self.table, self.rows, parts)
        return [
            float(sum(size for kind, size in ledger.items() if kind not in ACTIVATION_KINDS))
            for ledger in ledgers
        ]

    def _layer_seconds(self) -> list[float]:
        """What running the layers of each stage again takes, their exchanges among it."""
        _, again = base_costs(self.config, self.topology, self.cuts, layered=True)
        return [more - less for more, less in zip(again, self.backward, strict=True)]

    @property
    def choices(self) -> list[str]:
        """Of `offload.allow`, what can be had here."""
        return [name for name in self.config.offload.allow if name not in TIERS or name in self.tiers]

    def _tiers(self) -> list[str]:
        offload = self.config.offload
        there = {
            "host": offload.host_gb != 0,
            "peer": self.layout.pipeline > 1 and offload.peer_gb != 0 and peers_meet(self.config),
            "nvme": bool(offload.nvme_dir) and offload.nvme_gb != 0,
        }
        return [name for name, usable in there.items() if usable and name in self.allowed]


class _CaseSolver:
    """Sets of regions while certain whole layers are run again, or none."""

    def __init__(self, solver: _Solver, case: Case) -> None:
        self.solver, self.case = solver, case
        config = solver.config
        self.stages = build_stages(config, solver.cuts, solver.rows, layered=case.layer, mtp_layered=case.mtp)
        self.whole = {name for name, used in zip(WHOLE_LAYERS, case, strict=True) if used}
        self.known: dict[tuple[frozenset[str], int], _Tried] = {}
        made = {tensor.made_in for stage in self.stages for tensor in stage.tensors}
        names = [site.name for site in sites(config) if site.is_region and site.name in made]
        self.names = [name for name in names if name not in WHOLE_LAYERS]
        self.ranks = solver.layout.pipeline
        self.spent = {
            name: self._by_rank([stage.get(name, 0.0) for stage in solver.regions])
            for name in (*self.names, MTP_LAYER)
        }
        self.spent[LAYER] = self._by_rank(solver.again)

    def solve(self, best: _Tried | None) -> _Tried:
        """The best set, and how to hold the rest; unproved where it is worse than `best`."""
        fixed = {name: self.solver.fixed(name) for name in self.names}
        start = frozenset(name for name, storage in fixed.items() if storage and storage.recompute)
        free = [name for name in self.names if fixed[name] is None]
        if "recompute" not in self.solver.allowed:
            free = []
        chosen = following = start
        for name in sorted(free, key=self._price):
            following = following | {name}
            chosen = self._better(chosen, [following])
        chosen = self._climb(chosen, free)
        found = self.tried(chosen)
        if found.over > 0 or (best is not None and found.rank > best.rank):
            return found
        return self.tried(chosen, most_nodes=THOROUGH)

    def _climb(self, chosen: frozenset[str], free: Sequence[str]) -> frozenset[str]:
        """Add or leave out one region, or two at once, while that helps."""
        steps = [frozenset({name}) for name in free]
        steps += [frozenset(pair) for pair in combinations(free, 2)]
        while True:
            better = self._better(chosen, (chosen ^ step for step in steps))
            if better == chosen:
                return chosen
            chosen = better

    def _better(self, chosen: frozenset[str], others: Iterable[frozenset[str]]) -> frozenset[str]:
        """The best of `chosen` and `others`; those that cannot be better are not tried."""
        for other in others:
            best = self.tried(chosen)
            if best.over == 0 and max(self.base_seconds(other)) >= best.seconds * (1 - 1e-9):
                continue
            if len(self.known) >= MOST_SETS:
                break
            if self.tried(other).rank < best.rank:
                chosen = other
        return chosen

    def _price(self, region: str) -> float:
        """Seconds for each byte that running a region again saves, if nothing else is."""
        saved = self._held(frozenset()) - self._held(frozenset({region}))
        spent = sum(stage.get(region, 0.0) for stage in self.solver.regions)
        return spent / saved if saved > 0 else math.inf

    def _held(self, again: frozenset[str]) -> float:
        sizes = (stage.sizes((again | self.whole).__contains__, 0) for stage in self.stages)
        return sum(size.whole for stage in sizes for size in stage.values())

    def base_seconds(self, again: frozenset[str]) -> tuple[float, ...]:
        """Of running the regions of a set again, by rank."""
        return tuple(sum((self.spent[name] for name in again | self.whole), np.zeros(self.ranks)).tolist())

    def _by_rank(self, by_stage: Sequence[float]) -> np.ndarray:
        """Seconds of a step, [R], of those of a micro-batch in each stage."""
        layout, spent = self.solver.layout, np.zeros(self.ranks)
        for number, seconds in enumerate(by_stage):
            spent[layout.home(number)[0]] += layout.microbatches * seconds
        return spent

    def tried(self, again: frozenset[str], most_nodes: int = QUICK) -> _Tried:
        """The best way to hold what is left when these regions are run again."""
        key = again, most_nodes
        if key not in self.known:
            self.known[key] = self._try(again, most_nodes)
        return self.known[key]

    def _try(self, again: frozenset[str], most_nodes: int) -> _Tried:
        names, base = again | self.whole, self.base_seconds(again)
        smallest = self.solver.config.offload.min_kib << 10
        sizes = [stage.sizes(names.__contains__, smallest) for stage in self.stages]
        works = [stage.workspace(names.__contains__) for stage in self.stages]
        best = _Trial(self.solver, names, sizes, works, []).run(base, most_nodes)
        if self.solver.tiers and (best.over > 0 or best.seconds > max(base)):
            other = _Trial(self.solver, names, sizes, works, self.solver.tiers).run(base, most_nodes)
            best = min(best, other, key=lambda each: each.rank)
        return best


class _Trial:
    """One set of regions, with certain tiers: the problem of `activation_search`.

    Letters: K limits, N stages.
    """

    def __init__(
        self,
        solver: _Solver,
        again: frozenset[str],
        sizes: Sequence[Mapping[str, Sizes]],
        works: Sequence[float],
        tiers: Sequence[str],
    ) -> None:
        self.solver, self.again, self.sizes, self.tiers = solver, again, sizes, tiers
        self.layout = solver.layout
        self.element = element_bytes(solver.config.model)
        self.names = list(dict.fromkeys(name for stage in sizes for name in stage))
        speeds = rates(solver.config.cluster)
        self.speeds = [
            (tier, back, speeds[tier].back if back else speeds[tier].out)
            for tier in tiers
            for back in (False, True)
        ]
        self._set_limits(works)

    def _set_limits(self, works: Sequence[float]) -> None:
        """Limits of device memory at each moment that may be the worst, and of tiers of given sizes."""
        solver, layout = self.solver, self.layout
        window = solver.config.offload.inflight_mib << 20 if self.tiers else 0
        whole = [sum(size.whole for size in stage.values()) for stage in self.sizes]
        rows: dict[tuple[tuple[float, ...], ...], float] = {}
        nothing = (0.0,) * layout.stages
        for rank in range(layout.pipeline):
            own = [works[layout.stage(rank, chunk)] for chunk in range(layout.virtual)]
            most = max(
                sum(map(float.__mul__, self._by_stage(rank, counts), whole)) for counts in solver.counts[rank]
            )
            room = solver.budget - solver.static[rank] - max(own) - min(2 * window, most)
            borrower = layout.pipeline - 1 - rank
            lends = "peer" in self.tiers and lender(borrower, layout.pipeline) == rank
            for counts in solver.counts[rank]:
                for others in solver.counts[borrower] if lends else [()]:
                    lent = tuple(SPARE * count for count in self._by_stage(borrower, others))
                    key = (self._by_stage(rank, counts), *(lent if t == "peer" else nothing for t in TIERS))
                    rows[key] = min(room, rows.get(key, math.inf))
                for tier, capacity in tier_capacities(solver.config).items():
                    if tier in self.tiers:
                        full = self._by_stage(rank, counts)
                        rows[(nothing, *(full if t == tier else nothing for t in TIERS))] = capacity
        weights = np.array(list(rows)).reshape(len(rows), 1 + len(TIERS), layout.stages)
        self.weights = {name: weights[:, n] for n, name in enumerate(("device", *TIERS))}  # [K, N] each
        self.bounds = tuple(rows.values())

    def _by_stage(self, rank: int, counts: Sequence[int]) -> tuple[float, ...]:
        found = [0.0] * self.layout.stages
        for chunk, count in enumerate(counts):
            found[self.layout.stage(rank, chunk)] = float(count)
        return tuple(found)

    def run(self, base: tuple[float, ...], most_nodes: int) -> _Tried:
        """The best storages, where `base` seconds are spent in any case."""
        storages = [self._storages(name) for name in self.names]
        options = [
            tuple(self._option(name, each) for each in found)
            for name, found in zip(self.names, storages, strict=True)
        ]
        over = self._note_least(options)
        if over > 0:
            return _Tried(over, math.inf, {})
        ranks = [self.layout.home(number)[0] for number in range(self.layout.stages)]
        channels = [rank for _ in self.speeds for rank in ranks]
        fixed = Option("", (0.0,) * len(self.bounds), base, (0.0,) * len(channels))
        problem = Problem((*options, (fixed,)), self.bounds, tuple(channels), self._free())
        answer = search(problem, most_nodes=most_nodes)
        return _Tried(1.0, math.inf, {}) if answer is None else self._tried(answer, storages)

    def _tried(self, answer: Answer, storages: list[list[Storage]]) -> _Tried:
        picks = zip(self.names, storages, answer.choice, strict=False)
        found = {name: options[pick] for name, options, pick in picks}
        for region in self.again:
            found.setdefault(region, Storage(recompute=True))
        return _Tried(0.0, answer.seconds, found, answer.bound)

    def _note_least(self, options: Sequence[Sequence[Option]]) -> float:
        """Bytes by which even the least of every limit is over it; the budget that would do is noted."""
        needed = sum(np.array([option.uses for option in found]).min(axis=0) for found in options)
        over = float(np.max(needed - np.array(self.bounds), initial=0.0))
        self.solver.least = min(self.solver.least, self.solver.budget + over)
        return over

    def _storages(self, name: str) -> list[Storage]:
        """How a site may be held."""
        fixed = self.solver.fixed(name)
        if fixed is not None:
            return [fixed]
        plain = Storage(recompute=name in self.again)
        found = [plain, *(replace(plain, tier=tier) for tier in self.tiers)]
        if "fp8" in self.solver.allowed and any(name in stage and stage[name].model for stage in self.sizes):
            found += [replace(each, fp8=True) for each in found]
        return found

    def _option(self, name: str, storage: Storage) -> Option:
        layout, microbatches = self.layout, self.layout.microbatches
        held = {place: np.zeros(layout.stages) for place in ("device", *TIERS)}
        seconds = [0.0] * layout.pipeline
        for number, stage in enumerate(self.sizes):
            size = stage.get(name)
            if size is None:
                continue
            rank = layout.home(number)[0]
            away = storage.tier is not None and (
                storage.tier != "peer" or lender(rank, layout.pipeline) is not None
            )
            held["device"][number] = size.alone
            nbytes = size.coded(self.element) if storage.fp8 else size.whole
            held[storage.tier if away and storage.tier else "device"][number] += nbytes
            if storage.fp8:
                seconds[rank] += microbatches * 2 * coding_seconds(self.solver.config, size)
        uses = sum(self.weights[place] @ nbytes for place, nbytes in held.items())
        moves = [held[tier] * (microbatches / (speed * 1e9)) for tier, _, speed in self.speeds]
        busy = tuple(np.concatenate(moves).tolist()) if moves else ()
        return Option(str(storage), tuple(uses.tolist()), tuple(seconds), busy)  # type: ignore[union-attr]

    def _free(self) -> tuple[float, ...]:
        solver = self.solver
        return tuple(
            self.layout.microbatches * (beside + window_seconds(solver.config, speed))
            for _, back, speed in self.speeds
            for beside in (solver.backward if back else solver.forward)
        )


def _counts(table: Table, rank: int) -> list[tuple[int, ...]]:
    """Micro-batches held by chunk at every moment that no other one exceeds in all chunks."""
    last = WEIGHT if table.splits_backward else BACKWARD
    now = [0] * table.layout.virtual
    seen: set[tuple[int, ...]] = set()
    for op in table.ranks[rank]:
        if op.kind in (FORWARD, last):
            now[op.chunk] += 1 if op.kind == FORWARD else -1
            seen.add(tuple(now))
    return [
        each
        for each in sorted(seen)
        if not any(other != each and all(map(int.__le__, each, other)) for other in seen)
    ]

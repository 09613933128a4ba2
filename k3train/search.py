"""Finds the layouts of a number of GPUs that fit into memory and take the least time. Needs no torch.

Best first: layouts come in the order of what their step takes at the least (`search_bounds`), those that
cannot fit left out, and are planned exactly until no other one can be among the best. Of variants of a layout
(the cut of its layers, where activations and states lie) the fastest that fits is kept. `search_reference`
plans all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from parallel.topology import LayoutError

from . import host_plan, plan, step_end, step_time
from .activation_policy import TOWER_LAYER, policy_of, with_storage
from .config import Config
from .errors import UserError
from .layout import layout_of
from .memory import memory_for_plan, rank_memory
from .schedule import Simulation, layer_cuts, pipeline_table, row_plan, simulation, step_parts, with_bursts
from .search_bounds import Bounds, Cut, Shape
from .search_space import Layout, Space
from .step_time import StepTime
from .validate import validate

Progress = Callable[[int, int], None]
"""Told how much is done of how much, 0 where that is not known."""

CLOSE = 1 + 1e-9
"""Sums of the bounds round otherwise than the plan's."""


@dataclass(frozen=True)
class Planned:
    """A layout as `plan` sees it."""

    layout: Layout
    config: Config
    ranks: tuple[dict[str, int], ...]
    """Bytes by kind on a rank of each pipeline stage."""
    host: int
    """Bytes in host memory of the rank that has most there."""
    step: StepTime | None
    """None where it does not fit."""

    @property
    def fullest(self) -> int:
        """The pipeline rank that holds most."""
        return max(range(len(self.ranks)), key=lambda rank: sum(self.ranks[rank].values()))

    @property
    def bytes(self) -> int:
        """On that rank."""
        return sum(self.ranks[self.fullest].values())

    @property
    def order(self) -> tuple[float, int, int]:
        """The better, the less: time, then what is away from the device, then memory."""
        assert self.step is not None
        return self.step.seconds, self.layout.states.away, self.bytes


@dataclass
class Found:
    """What a search has found."""

    best: list[Planned]
    limit: int
    """Bytes of a rank that a layout may count on."""
    bounded: int = 0
    """Layouts whose bounds were calculated."""
    fitting: int = 0
    """Those of them that may fit."""
    planned: int = 0
    nearest: Planned | None = None
    """Where nothing fits: what misses by least."""
    tried: dict[Layout, Planned] = field(default_factory=dict)
    """All that were planned and fit."""


class Planner:
    """Plans layouts of a space exactly, each once."""

    def __init__(self, space: Space) -> None:
        self.space, self.limit = space, memory_for_plan(space.config)
        self.host_limit = host_plan.limit(space.config)
        self._memory: dict[Layout, Planned | None] = {}
        self._known: dict[Layout, Planned | None] = {}

    def held(self, layout: Layout) -> Planned | None:
        """Its memory; None where `validate` refuses it."""
        if layout not in self._memory:
            self._memory[layout] = self._look(layout)[0]
        return self._memory[layout]

    def plan(self, layout: Layout) -> Planned | None:
        """Its time too, where it fits."""
        if layout not in self._known:
            found, simulated = self._look(layout)
            if found is not None and found.bytes <= self.limit and found.host <= self.host_limit:
                found = replace(found, step=_step(found.config, simulated))
            self._known[layout] = found
        return self._known[layout]

    def _look(self, layout: Layout) -> tuple[Planned | None, Simulation | None]:
        """Its memory, and its pipeline where that had to be simulated for it."""
        try:
            config = self.configure(layout)
            simulated = _simulated(config)
            ranks, host = ledgers(config, simulated)
        except (UserError, LayoutError):
            return None, None
        return Planned(layout, config, tuple(ranks), host_plan.fullest(host), None), simulated

    def configure(self, layout: Layout) -> Config:
        """The whole configuration, validated."""
        config = self.space.configure(layout)
        validate(config, self.space.gpus, inputs=False)
        if config.vision.enabled and policy_of(config).pattern(TOWER_LAYER) is None:
            found = "recompute" if plan.recomputes_vision(config, self.space.gpus) else "keep"
            resolved = with_storage(config, {TOWER_LAYER: found})
            config = replace(config, offload=replace(config.offload, resolved=resolved))
        return config


def _simulated(config: Config) -> Simulation | None:
    """The pipeline, where memory depends on times: with a vision tower in its bubbles."""
    return simulation(config, layout_of(config), compare=False) if config.vision.enabled else None


def _step(config: Config, simulated: Simulation | None) -> StepTime:
    """`step_time.predict`, of a pipeline that may be simulated already."""
    if simulated is None:
        return step_time.predict(config)
    return step_time.of_simulation(config, layout_of(config), simulated)


def ledgers(
    config: Config, simulated: Simulation | None
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Bytes by kind of a rank of each stage, on its device and in host memory, as `plan` has them."""
    topology = layout_of(config)
    if simulated is not None:
        table, parts = simulated.timeline.table, step_parts(simulated)
    else:
        table, parts = with_bursts(config, pipeline_table(config, topology)), ()
    cuts = layer_cuts(config, topology)
    rows = row_plan(config, topology, cuts, vee=table.layout.vee)
    held = rank_memory(config, topology, cuts, table, rows, parts)
    return held, host_plan.host_ledgers(config, topology, cuts, table, rows, parts)


def search(space: Space, top: int = 10, progress: Progress | None = None) -> Found:
    """The `top` best layouts; `nearest` where nothing fits."""
    planner = Planner(space)
    found = Found([], planner.limit)
    queue = _Queue(space, found, progress)
    best: dict[tuple[int, ...], Planned] = {}
    while queue.heap:
        bound, _, layout, exact = heapq.heappop(queue.heap)
        worst = sorted(each.order for each in best.values())[:top]
        if len(worst) == top and bound > worst[-1][0] * CLOSE:
            break
        own = best.get(layout.name)
        if own is not None and own.step is not None and bound > own.step.seconds * CLOSE:
            continue
        if not exact:
            queue.push(bound + queue.end_seconds(layout), layout, exact=True)
            continue
        if queue.is_dominated(layout, found.tried):
            continue
        if own is not None and queue.is_slower(layout, own):
            continue
        found.planned += 1
        if progress:
            progress(found.planned, 0)
        planned = planner.plan(layout)
        if planned is not None and planned.step is not None:
            found.tried[layout] = planned
            queue.note(planned)
            if own is None or planned.order < own.order:
                best[layout.name] = planned
    found.best = sorted(best.values(), key=lambda each: each.order)[:top]
    if not found.best:
        found.nearest = queue.nearest(planner)
    return found


def leanest(space: Space) -> Planned | None:
    """The layout that needs least memory; None where there is none."""
    planner = Planner(space)
    return _Queue(space, Found([], planner.limit), None, timed=False).nearest(planner)


class _Queue:
    """Layouts that may fit, by their least time."""

    def __init__(self, space: Space, found: Found, progress: Progress | None, *, timed: bool = True) -> None:
        self.space, self.found, self.bounds, self.timed = space, found, Bounds(space), timed
        self.heap: list[tuple[float, int, Layout, bool]] = []
        self.least: list[tuple[float, int, Layout]] = []
        self._ends: dict[object, float] = {}
        self._pipelines: dict[Layout, float] = {}
        pairs = [(p, v) for p in space.pipelines() for v in space.virtuals(p)]
        for done, (pipeline, virtual) in enumerate(pairs):
            if progress:
                progress(done, len(pairs))
            for layers in space.cuts(pipeline, virtual):
                self._fill(Cut(pipeline, virtual, layers))

    def push(self, bound: float, layout: Layout, *, exact: bool) -> None:
        """Among equal ones, in the order of coming."""
        heapq.heappush(self.heap, (bound, self._next(), layout, exact))

    def _next(self) -> int:
        self._count = getattr(self, "_count", 0) + 1
        return self._count

    def _fill(self, cut: Cut) -> None:
        space = self.space
        policies = [name for name in space.policies if space.usable(cut.pipeline, name)]
        for context, data in space.spreads(cut.pipeline):
            for size, count in space.batches(context, data):
                for policy in policies:
                    shape = Shape(context, size, policy)
                    self._fit(cut, data, count, shape, self.bounds.held(cut, shape, count))

    def _fit(self, cut: Cut, data: int, count: int, shape: Shape, held: np.ndarray) -> None:
        """Queue what fits of expert parallelism and states; `held` is [E, S]."""
        self.found.bounded += held.size
        fits = held <= self.found.limit * CLOSE
        self.found.fitting += int(fits.sum())

        def layout(e: int, s: int) -> Layout:
            return Layout(
                cut.pipeline, cut.virtual, self.space.experts(cut.pipeline)[e], shape.context, data,
                shape.size, count, cut.layers, shape.policy, self.space.states[s],
            )  # fmt: skip

        e, s = np.unravel_index(int(held.argmin()), held.shape)
        self.least.append((float(held[e, s]), self._next(), layout(int(e), int(s))))
        if not self.timed:
            return
        for e in np.flatnonzero(fits.any(axis=1)):
            bound = self.bounds.seconds(cut, shape, self.space.experts(cut.pipeline)[e], count)
            for s in np.flatnonzero(fits[e]):
                self.push(bound, layout(int(e), int(s)), exact=False)

    def end_seconds(self, layout: Layout) -> float:
        """Of what follows the pipeline in a step; micro-batches matter to ZeRO-2 alone."""
        count = layout.microbatches if layout.states.zero == 2 else 1
        key = replace(layout, size=1, policy="", microbatches=count)
        if key not in self._ends:
            config = self.space.configure(layout)
            topology = layout_of(config)
            parts = step_end.parts(config, topology, layer_cuts(config, topology))
            self._ends[key] = sum(part.seconds for part in parts.values())
        return self._ends[key]

    def is_dominated(self, layout: Layout, tried: dict[Layout, Planned]) -> bool:
        """Whether the same fits with less away from the device, which takes no longer."""
        return any(
            replace(layout, states=states) in tried
            for states in self.space.states
            if states.zero == layout.states.zero and states.away < layout.states.away
        )

    def note(self, planned: Planned) -> None:
        """Keep the seconds of a pipeline: where states lie changes nothing of them, without its backlog."""
        assert planned.step is not None
        layout = planned.layout
        seconds = planned.step.seconds - planned.step.parts.get(step_time.BACKLOG, 0.0)
        seconds -= self.end_seconds(layout)
        self._pipelines[replace(layout, states=self.space.states[0])] = seconds

    def is_slower(self, layout: Layout, own: Planned) -> bool:
        """Whether a variant with a known pipeline is no better than the best one of its layout."""
        pipeline = self._pipelines.get(replace(layout, states=self.space.states[0]))
        if pipeline is None or own.step is None:
            return False
        seconds, best = pipeline + self.end_seconds(layout), own.step.seconds
        if seconds > best / CLOSE and layout.states.away > own.layout.states.away:
            return True
        return seconds > best * CLOSE

    def nearest(self, planner: Planner) -> Planned | None:
        """What misses the memory by least."""
        best: Planned | None = None
        for bound, _, layout in sorted(self.least):
            if best is not None and bound > best.bytes:
                break
            found = planner.held(layout)
            if found is not None and (best is None or found.bytes < best.bytes):
                best = found
        return best

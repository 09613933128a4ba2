"""What a layout holds and how long its pipeline takes at the least, without a table of operations. No torch.

Both are sums over layers of what the plan's own functions say of a layer alone, equal layers looked at once.
Bytes leave out what a sum cannot tell, such as tiers that are full; seconds are those of the busiest rank,
with what stages before it do first and last. So the plan never says less.

Letters: L kinds of layers, C chunks, p ranks of a pipeline, E x S pairs of expert parallelism and states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from parallel.pipeline.build import build, usual
from parallel.pipeline.rows import RowPlan
from parallel.pipeline.table import FORWARD
from parallel.pipeline.table import Layout as Order
from parallel.topology import Topology, split_layers
from parallel.zero2 import SLOTS

from .activation_ledger import BANK, recomputed, stage_places, stages
from .activation_policy import LAYER, TOWER_LAYER, policy_of, recomputes, with_storage
from .activation_time import GIGA, Rates, added, rates, window_seconds
from .config import Config
from .expert_plan import slot_bytes, staging_bytes, working_bytes
from .image_load import default_load
from .loss_plan import logits_bytes
from .memory import features_bytes, state_ledger, vision_kept, vision_states
from .microbatch import row_bytes, tokens_per_microbatch
from .quant_plan import rounded_bytes
from .schedule import row_plan
from .search_space import Layout, Space, States
from .shapes import Parameter, block_starts, compact_parameters, layer_kinds
from .stage_time import OPERATION, stage_work

WARM_GROUPS = 3
"""Groups of micro-batches of a table that warms up as a longer one does."""


class Cut(NamedTuple):
    """How the layers lie in chunks."""

    pipeline: int
    virtual: int
    layers: tuple[int, ...] | None


class Shape(NamedTuple):
    """What an operation of a micro-batch depends on, beside the chunk."""

    context: int
    size: int
    policy: str


def layer_seconds(config: Config) -> list[float]:
    """Of each layer for a micro-batch of a configuration, what stands behind the last one with it."""
    expert, count = config.parallel.expert.size, config.model.num_layers
    single = [range(layer, layer + 1) for layer in range(count)]
    topology = Topology(expert=expert, data=expert)
    works = stage_work(config, topology, single, layered=recomputes(config, LAYER))
    return [sum(work.seconds) for work in works]


class Bounds:
    """Of all layouts of a space; parts that layouts share are calculated once."""

    def __init__(self, space: Space) -> None:
        self.space, self.config = space, space.config
        self._known: dict[object, np.ndarray] = {}
        self._ledgers: dict[object, tuple[np.ndarray, np.ndarray, np.ndarray, float]] = {}

    # Kinds of layers

    @cached_property
    def kinds(self) -> tuple[list[int], list[range]]:
        """Kind of each decoder layer, and one layer of each kind."""
        model = self.config.model
        seen: dict[object, int] = {}
        found, one = [], []
        for layer, kind in enumerate(layer_kinds(model)):
            key = kind, block_starts(model, layer), block_starts(model, layer + 1), not layer
            if key not in seen:
                seen[key] = len(seen)
                one.append(range(layer, layer + 1))
            found.append(seen[key])
        return found, one

    def counts(self, cut: Cut) -> np.ndarray:
        """Layers of each kind in each chunk, and whether it is the first and the last one: [C, L + 2]."""
        key = "counts", cut
        if key not in self._known:
            of, one = self.kinds
            ranges = split_layers(len(of), cut.pipeline * cut.virtual, _listed(cut.layers))
            found = np.zeros((len(ranges), len(one) + 2))
            for chunk, layers in enumerate(ranges):
                for layer in layers:
                    found[chunk, of[layer]] += 1
            found[0, -2] = found[-1, -1] = 1
            self._known[key] = found
        return self._known[key]

    # Bytes

    def states(self, cut: Cut) -> np.ndarray:
        """Bytes of states on each rank, by expert parallelism and where states lie: [E, S, p]."""
        key = "states", cut
        if key not in self._known:
            found = [
                [self._states(cut, expert, states) for states in self.space.states]
                for expert in self.space.experts(cut.pipeline)
            ]
            self._known[key] = np.array(found)
        return self._known[key]

    def _states(self, cut: Cut, expert: int, states: States) -> np.ndarray:
        """[p]"""
        sums, slots, windows, rest = self._state_kinds(cut.pipeline, expert, states)
        counts = self.counts(cut)

        def by_rank(kinds: np.ndarray) -> np.ndarray:
            return (counts @ kinds).reshape(cut.virtual, cut.pipeline)

        found = by_rank(sums).sum(axis=0) + rest
        if states.zero == 2:
            found += min(SLOTS, cut.virtual) * by_rank(slots).max(axis=0)
        if states.optimizer != "device":
            window = 2.0 * (self.config.offload.window_mib << 20)
            found += np.minimum(by_rank(windows).sum(axis=0), window)
        return found

    def _state_kinds(
        self, pipeline: int, expert: int, states: States
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Sums of the ledger, slots and windows, [L + 2] each, and what every rank has."""
        key = pipeline, expert, states
        if key not in self._ledgers:
            self._ledgers[key] = self._of_states(pipeline, expert, states)
        return self._ledgers[key]

    def _of_states(
        self, pipeline: int, expert: int, states: States
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        ranks = self.space.gpus // pipeline
        layout = Layout(pipeline, 1, expert, 1, ranks, 1, 1, None, next(iter(self.space.policies)), states)
        config = self.space.configure(layout)
        topology = Topology(pipeline=pipeline, expert=expert, data=ranks)
        ledgers = [state_ledger(config, topology, [entries]) for entries in self._entries]
        slots = np.array([ledger.pop("gradient_slots", 0) for ledger in ledgers], dtype=float)
        windows = np.array([ledger.pop("optimizer_windows", 0) for ledger in ledgers], dtype=float)
        sums = np.array([sum(ledger.values()) for ledger in ledgers], dtype=float)
        if config.quant.hold_weights:
            sums += [rounded_bytes(config, topology, entries) for entries in self._entries]
        rest = slot_bytes(config, topology) + staging_bytes(config, topology)
        if config.vision.enabled:
            rest += vision_states(config, topology)
        return sums, slots, windows, float(rest)

    @cached_property
    def _entries(self) -> list[list[Parameter]]:
        """Parameters of one layer of each kind, before the first layer, and behind the last."""
        _, one = self.kinds
        found: dict[object, list[Parameter]] = {layers.start: [] for layers in one}
        found |= {"before": [], "behind": []}
        for entry in compact_parameters(self.config.model):
            ends = "before" if entry.kind == "embedding" else "behind"
            place = ends if entry.layer is None else entry.layer
            if place in found:
                found[place].append(entry)
        return list(found.values())

    def held(self, cut: Cut, shape: Shape, microbatches: int) -> np.ndarray:
        """Bytes of the fullest rank, by expert parallelism and where states lie: [E, S]."""
        ranks = self.states(cut) + self.activations(cut, shape, microbatches)
        most: np.ndarray = ranks.max(axis=2)
        if not self.config.vision.enabled:
            return most
        # The tower's activations of what is under way lie on some ranks: at best they fill the emptiest up.
        spread = self._tower_kept(shape) * self._warm(cut, microbatches)[0]
        filled = np.sort(ranks, axis=2).cumsum(axis=2) + spread
        return np.maximum(most, (filled / np.arange(1, cut.pipeline + 1)).min(axis=2))

    def _tower_kept(self, shape: Shape) -> float:
        """Bytes that the images of a micro-batch leave behind, kept or run again, whichever is less."""
        key = "tower", shape
        if key not in self._known:
            config = self._shaped(1, shape)
            ways = [config]
            if policy_of(config).pattern(TOWER_LAYER) is None:
                kept = (with_storage(config, {TOWER_LAYER: name}) for name in ("keep", "recompute"))
                ways = [replace(config, offload=replace(config.offload, resolved=each)) for each in kept]
            grids = default_load(config).grids
            # Parts of a micro-batch each round down to a byte.
            least = min(vision_kept(way, grids) for way in ways) - config.parallel.pipeline - len(grids)
            self._known[key] = np.array(max(0, least))
        return float(self._known[key])

    def activations(self, cut: Cut, shape: Shape, microbatches: int) -> np.ndarray:
        """Bytes of activations on each rank when it has warmed up: [p]."""
        held, again = self._activation_kinds(cut.pipeline, shape)
        counts, warm = self.counts(cut), self._warm(cut, microbatches)
        config = self._shaped(cut.pipeline, shape)

        def by_rank(chunks: np.ndarray) -> np.ndarray:
            return chunks.reshape(cut.virtual, cut.pipeline)

        found: np.ndarray = by_rank(warm * (counts @ held + self._messages(cut, config))).sum(axis=0)
        workspace = by_rank(np.where(counts > 0, again, 0.0).max(axis=1)).max(axis=0)
        row = row_bytes(config) * (cut.pipeline > 1)
        found += workspace + 3 * row * by_rank(self._widths(cut)).max(axis=0)
        found += tokens_per_microbatch(config) * working_bytes(config)
        found[-1] += logits_bytes(config)
        if config.vision.enabled:
            # Embeddings of images from the forward that reads them, and once more as a gradient.
            found[0] += (warm[0] + 1) * features_bytes(config, default_load(config).grids)
        away = sum(by_rank(warm * chunks).sum(axis=0) for chunks, _ in self._away(cut, shape))
        return found + np.minimum(2.0 * (config.offload.inflight_mib << 20), away)

    def _away(self, cut: Cut, shape: Shape) -> list[tuple[np.ndarray, Rates]]:
        """Bytes of each tier that a chunk's micro-batch leaves there, [C], and how fast it is."""
        config = self._shaped(cut.pipeline, shape)
        tiers = sorted(policy_of(config).tiers() - {"peer"})
        if not tiers:
            return []
        key = "away", shape
        if key not in self._known:
            found = stages(config, self._single, _alone(len(self._single)))
            held = [stage_places(config, stage, 0) for stage in found]
            self._known[key] = np.stack(
                [self._with_ends(np.array([each.get(tier, 0.0) for each in held])) for tier in tiers]
            )
        messages = row_bytes(config) * (self._widths(cut) > 1)
        speeds = rates(config.cluster)
        return [
            (np.maximum(0.0, self.counts(cut) @ kinds - messages), speeds[tier])
            for tier, kinds in zip(tiers, self._known[key], strict=True)
        ]

    def _messages(self, cut: Cut, config: Config) -> np.ndarray:
        """What arrives at a chunk with a message, and is held until its backward: [C]."""
        storage, row = policy_of(config).storage(BANK), row_bytes(config)
        on_device = not (storage.recompute or storage.fp8 or storage.tier)
        return np.array(
            [(row * (width * on_device - 1) if width > 1 else 0.0) for width in self._widths(cut)]
        )

    def _widths(self, cut: Cut) -> np.ndarray:
        """Rows in the message into each chunk: [C]."""
        key = "widths", cut
        if key not in self._known:
            topology = Topology(pipeline=cut.pipeline, virtual=cut.virtual)
            layers = split_layers(self.config.model.num_layers, topology.num_chunks, _listed(cut.layers))
            rows = row_plan(self.config, topology, layers)
            self._known[key] = np.array([rows.width(stage) if stage else 1 for stage in range(len(layers))])
        return self._known[key]

    def _warm(self, cut: Cut, microbatches: int) -> np.ndarray:
        """Micro-batches that each chunk holds when its rank comes to its first backward: [C]."""
        pipeline, virtual, _ = cut
        group = self.config.parallel.microbatch_group or pipeline
        group = group if virtual > 1 and group >= pipeline else pipeline
        most = WARM_GROUPS * group if virtual > 1 else pipeline
        count = min(most, microbatches - microbatches % group if microbatches > group else microbatches)
        key = "warm", pipeline, virtual, count
        if key not in self._known:
            table = build(usual(virtual), pipeline, virtual, count, group if virtual > 1 else None)
            found = np.zeros(pipeline * virtual)
            for rank, ops in enumerate(table.ranks):
                first = next(index for index, op in enumerate(ops) if op.kind != FORWARD)
                for op in ops[:first]:
                    found[table.layout.stage(rank, op.chunk)] += 1
            self._known[key] = found
        return self._known[key]

    def _activation_kinds(self, pipeline: int, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that a micro-batch leaves on the device, and that running a region again takes: [L + 2]."""
        borrows = shape.policy if "peer" in self._tiers(shape.policy) else ""
        key = "kinds", shape, pipeline if borrows else 0
        if key not in self._known:
            config = self._shaped(pipeline, shape)
            group = config.offload.recompute_layers if recomputes(config, LAYER) else 1
            found = stages(config, self._single, _alone(len(self._single)))
            held = np.array([_on_device(stage_places(config, stage, 0)) for stage in found])
            again = np.array([stage.workspace(recomputed(policy_of(config))) for stage in found])
            held = self._with_ends(held)
            # Of layers that are run again together, all but one hold next to nothing.
            held[:-2] /= group
            self._known[key] = np.stack([held, np.insert(again, -1, 0.0)])
        return self._known[key][0], self._known[key][1]

    @cached_property
    def _single(self) -> list[range]:
        """One layer of each kind, and the last one with what stands behind it."""
        _, one = self.kinds
        last = self.config.model.num_layers - 1
        return [*one, range(last, last + 1)]

    def _with_ends(self, values: np.ndarray) -> np.ndarray:
        """[L + 2] of one layer of each kind and the last one with what stands behind it, [L + 1]."""
        found: np.ndarray = np.insert(values, -1, 0.0)
        found[-1] -= values[self.kinds[0][-1]]
        return found

    def _tiers(self, policy: str) -> set[str]:
        return policy_of(self._shaped(1, Shape(1, 1, policy))).tiers()

    def _shaped(self, pipeline: int, shape: Shape, expert: int = 1) -> Config:
        ranks = self.space.gpus // pipeline
        states = self.space.states[0]
        layout = Layout(
            pipeline,
            1,
            expert,
            shape.context,
            ranks // shape.context,
            shape.size,
            1,
            None,
            shape.policy,
            states,
        )
        return self.space.configure(layout)

    # Seconds

    def seconds(self, cut: Cut, shape: Shape, expert: int, microbatches: int) -> float:
        """Of a step."""
        config = self._shaped(cut.pipeline, shape)
        ahead, back = self._work_kinds(cut.pipeline, shape, expert, recomputes(config, LAYER))
        coding, again = self._added_kinds(cut.pipeline, shape)
        counts = self.counts(cut)
        forward, backward = counts @ ahead, counts @ (back + again)
        # What is not hidden beside an operation: the longer of the two takes its time.
        for away, speed in self._away(cut, shape):
            out, home = (
                away / (rate * GIGA) - window_seconds(config, rate) for rate in (speed.out, speed.back)
            )
            forward, backward = np.maximum(forward, out), np.maximum(backward, home)
        forward, backward = forward + counts @ coding, backward + counts @ coding
        both = (forward + backward).reshape(cut.virtual, cut.pipeline)
        before = np.concatenate(([0.0], np.cumsum(both[0])[:-1]))
        return float((before + microbatches * both.sum(axis=0)).max())

    def _work_kinds(self, pipeline: int, shape: Shape, expert: int, layered: bool) -> np.ndarray:
        """Operators and exchanges: [2, L + 2]."""
        key = "work", shape.context, shape.size, expert, layered
        if key not in self._known:
            config = self._shaped(pipeline, shape, expert)
            ranks = self.space.gpus // pipeline
            topology = Topology(pipeline, 1, expert, shape.context, ranks // shape.context)
            works = stage_work(config, topology, self._single, layered=layered)
            halves = (
                [sum(half.values()) - half.get(OPERATION, 0.0) for half in halves]
                for halves in zip(*((work.forward, work.backward) for work in works), strict=True)
            )
            self._known[key] = np.stack([self._with_ends(np.array(half)) for half in halves])
        return self._known[key]

    def _added_kinds(self, pipeline: int, shape: Shape) -> np.ndarray:
        """What the policy adds, but for waits: coding to both, recompute to the backward: [2, L + 2]."""
        borrows = "peer" in self._tiers(shape.policy)
        key = "added", shape, pipeline if borrows else 0
        if key not in self._known:
            config, rows, zeros = self._shaped(pipeline, shape), _alone(len(self._single)), [0.0]
            zeros *= len(self._single)
            more = added(config, self._single, rows, zeros, zeros)
            values = np.array([(each.coding, each.recompute) for each in more]).T
            self._known[key] = np.stack([self._with_ends(half) for half in values])
        return self._known[key]


def _listed(cut: tuple[int, ...] | None) -> list[int] | None:
    return None if cut is None else list(cut)


def _on_device(held: Mapping[str, float]) -> float:
    return sum(held.get(place, 0.0) for place in ("device", "alone", "fp8", "bank"))


def _alone(count: int) -> RowPlan:
    """Of layers into which no rows come."""
    return RowPlan(Order(count, 1, 1), ())

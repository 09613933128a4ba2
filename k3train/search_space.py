"""The layouts that a search looks at, and the configuration that each of them is. Needs no torch.

A layout deals GPUs out to pipeline, context and data parallelism, and to expert parallelism among the ranks
of a stage; it cuts the layers into chunks, and a step's samples, whose number is given, into micro-batches;
and it says where states and activations lie. Divisors alone are listed; what else cannot be, `validate`
refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from offload.policy import Policy, PolicyError

from .activation_policy import peers_meet
from .compatibility import clash
from .config import Config
from .errors import UserError

EVERY_VIRTUAL = 8
"""Chunks on a rank up to which every number is tried; beyond, the least for each size of the largest one."""

LEAST_SHARE = 1024
"""Tokens of a sequence that a rank of a context group has at least; a quarter of one is always tried."""
MOST_TOKENS = 65_536
"""Of a micro-batch on a rank, where it has more than one sample."""

SEARCHED = (
    "run.microbatches", "data.micro_batch_size", "parallel.pipeline", "parallel.virtual",
    "parallel.expert.size", "parallel.context", "parallel.data", "parallel.zero", "parallel.layers_per_chunk",
    "offload.policy", "offload.gradients", "offload.optimizer", "cluster.nodes",
)  # fmt: skip
"""Keys that a layout sets."""

FIXABLE = tuple(key for key in SEARCHED if key not in ("run.microbatches", "cluster.nodes"))
"""Those that stay as they are where a person sets them; `run.microbatches` says how large a batch is."""


class States(NamedTuple):
    """Where gradients and optimizer states lie."""

    zero: int
    gradients: str
    optimizer: str

    @property
    def away(self) -> int:
        """How far from the device: a host counts one, a disk two."""
        return sum(("device", "host", "nvme").index(place) for place in (self.gradients, self.optimizer))


@dataclass(frozen=True)
class Layout:
    """One layout."""

    pipeline: int
    virtual: int
    expert: int
    context: int
    data: int
    size: int
    """Samples of a micro-batch."""
    microbatches: int
    cut: tuple[int, ...] | None
    """Layers of each chunk, spread evenly where None."""
    policy: str
    """Of activations."""
    states: States

    @property
    def name(self) -> tuple[int, int, int, int, int]:
        """What makes it another one, and no variant of the same: of variants the best is listed."""
        return self.pipeline, self.virtual, self.expert, self.context, self.size


@dataclass
class Space:
    """What is searched: a configuration, and what is free in it."""

    config: Config
    """Resolved for any layout: `vocab_size` and everything but the layout is set."""
    gpus: int
    samples: int
    """Of a step, over all ranks."""
    policies: Mapping[str, Mapping[str, str]]
    """Rules of every policy that may be chosen, the cheapest to run first."""
    fixed: frozenset[str] = frozenset()
    """Keys of `FIXABLE` that keep the configuration's value."""
    weights: Sequence[float] = ()
    """Seconds of each layer, what stands behind the last one with it, by which chunks are balanced."""
    _cuts: dict[tuple[int, int], list[tuple[int, ...] | None]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.samples * self.config.data.sequence_length

    def pipelines(self) -> list[int]:
        """Numbers of stages."""
        most = self.config.model.num_layers
        return self._chosen("parallel.pipeline", [n for n in divisors(self.gpus) if n <= most])

    def spreads(self, pipeline: int) -> list[tuple[int, int]]:
        """(context, data) of the ranks of a stage."""
        ranks, length = self.gpus // pipeline, self.config.data.sequence_length
        most = max(4, length // LEAST_SHARE)
        found = [
            (context, ranks // context)
            for context in self._chosen("parallel.context", [n for n in divisors(ranks) if n <= most])
            if length % context == 0 and ranks % context == 0 and self.samples % (ranks // context) == 0
        ]
        if "parallel.data" in self.fixed:
            found = [pair for pair in found if pair[1] == self.config.parallel.data]
        return found

    def virtuals(self, pipeline: int) -> list[int]:
        """Numbers of chunks on a rank."""
        layers = self.config.model.num_layers
        most = layers // pipeline if pipeline > 1 else 1
        sizes: dict[int, int] = {}
        for number in range(1, most + 1):
            sizes.setdefault(-(-layers // (pipeline * number)), number)
        found = [n for n in range(1, most + 1) if n <= EVERY_VIRTUAL or n in sizes.values()]
        return [n for n in self._chosen("parallel.virtual", found) if n * pipeline <= layers]

    def experts(self, pipeline: int) -> list[int]:
        """Numbers of ranks that share the experts of a layer."""
        count, spread = self.config.model.num_experts, self.gpus // pipeline
        found = [n for n in divisors(spread) if n == 1 or (count and count % n == 0)]
        return [n for n in self._chosen("parallel.expert.size", found) if n in found]

    def batches(self, context: int, data: int) -> list[tuple[int, int]]:
        """(samples of a micro-batch, number of micro-batches) of a rank."""
        own, most = self.samples // data, MOST_TOKENS * context // self.config.data.sequence_length
        sizes = self._chosen("data.micro_batch_size", [n for n in divisors(own) if n <= max(1, most)])
        return [(size, own // size) for size in sizes if own % size == 0]

    def cuts(self, pipeline: int, virtual: int) -> list[tuple[int, ...] | None]:
        """Layers of each chunk: even, balanced by time, and as the configuration has them."""
        key = pipeline, virtual
        if key not in self._cuts:
            self._cuts[key] = self._find_cuts(pipeline * virtual)
        return self._cuts[key]

    def _find_cuts(self, chunks: int) -> list[tuple[int, ...] | None]:
        given, layers = self.config.parallel.layers_per_chunk, self.config.model.num_layers
        own = [tuple(given)] if given and len(given) == chunks and sum(given) == layers else []
        if "parallel.layers_per_chunk" in self.fixed:
            return [*own] if given else [None]
        share, more = divmod(layers, chunks)
        even = tuple(share + (chunk < more) for chunk in range(chunks))
        found = dict.fromkeys([*([balanced(self.weights, chunks)] if self.weights else []), *own])
        return [None, *(cut for cut in found if cut != even)]

    @cached_property
    def states(self) -> list[States]:
        """Stages of ZeRO and places of states that the optimizer can do, those on the device first."""
        offload = self.config.offload
        places = ["device", "host", *(["nvme"] if (offload.nvme_dir or "").strip() else [])]
        zeros = self._chosen("parallel.zero", [0, 1, 2])
        choices = (
            zeros,
            self._chosen("offload.gradients", places),
            self._chosen("offload.optimizer", places),
        )
        found = [States(*choice) for choice in product(*choices)]
        found = [
            each
            for each in found
            if (each.gradients == "device" or each.zero == 2) and (each.optimizer == "device" or each.zero)
        ]
        return sorted(
            (each for each in found if clash(self._with_states(each)) is None), key=lambda each: each.away
        )

    def usable(self, pipeline: int, policy: str) -> bool:
        """Whether a policy can be had with so many stages."""
        if "peer" not in policy_tiers(self.policies[policy]):
            return True
        ranks = self.gpus // pipeline
        parallel = replace(self.config.parallel, pipeline=pipeline, context=1, data=ranks)
        cluster = replace(self.config.cluster, ranks_per_node=self.gpus // self.nodes)
        return pipeline > 1 and peers_meet(replace(self.config, parallel=parallel, cluster=cluster))

    def layouts(self) -> Iterator[Layout]:
        """All of them."""
        for pipeline in self.pipelines():
            policies = [name for name in self.policies if self.usable(pipeline, name)]
            for virtual, expert in product(self.virtuals(pipeline), self.experts(pipeline)):
                for (context, data), cut in product(self.spreads(pipeline), self.cuts(pipeline, virtual)):
                    for (size, count), policy in product(self.batches(context, data), policies):
                        for states in self.states:
                            yield Layout(
                                pipeline, virtual, expert, context, data, size, count, cut, policy, states
                            )

    @property
    def nodes(self) -> int:
        """Machines; GPUs that one machine could hold share one."""
        cluster = self.config.cluster
        own = cluster.ranks_per_node or (self.gpus if cluster.gpu == "cpu" else cluster.gpus_per_node)
        if self.gpus <= own:
            return 1
        if self.gpus % own:
            raise UserError(f"cluster.gpus={self.gpus}: no whole nodes of {own}; use a multiple of that")
        return self.gpus // own

    def configure(self, layout: Layout) -> Config:
        """The configuration of a layout, but for how the vision tower keeps its activations (`plan`)."""
        config, parallel = self.config, self.config.parallel
        group = parallel.microbatch_group
        return replace(
            self._with_states(layout.states, dict(self.policies[layout.policy]), layout.policy),
            run=replace(config.run, microbatches=layout.microbatches),
            data=replace(config.data, micro_batch_size=layout.size),
            parallel=replace(
                parallel,
                pipeline=layout.pipeline,
                virtual=layout.virtual,
                expert=replace(parallel.expert, size=layout.expert),
                context=layout.context,
                data=layout.data,
                zero=layout.states.zero,
                layers_per_chunk=None if layout.cut is None else list(layout.cut),
                microbatch_group=None if group is None or not _grouped(layout, group) else group,
            ),
            cluster=replace(config.cluster, nodes=self.nodes, ranks_per_node=self.gpus // self.nodes),
        )

    def overrides(self, layout: Layout) -> list[str]:
        """The same on a command line."""
        cut = "null" if layout.cut is None else "[" + ",".join(map(str, layout.cut)) + "]"
        values = {
            "run.microbatches": layout.microbatches,
            "data.micro_batch_size": layout.size,
            "parallel.pipeline": layout.pipeline,
            "parallel.virtual": layout.virtual,
            "parallel.expert.size": layout.expert,
            "parallel.context": layout.context,
            "parallel.data": layout.data,
            "parallel.zero": layout.states.zero,
            "parallel.layers_per_chunk": cut,
            "offload.policy": layout.policy,
            "offload.gradients": layout.states.gradients,
            "offload.optimizer": layout.states.optimizer,
            "cluster.nodes": self.nodes,
        }
        group = self.config.parallel.microbatch_group
        if group is not None and not _grouped(layout, group):
            values["parallel.microbatch_group"] = "null"
        return [f"{key}={value}" for key, value in values.items()]

    def _with_states(
        self, states: States, rules: dict[str, str] | None = None, policy: str | None = None
    ) -> Config:
        config = self.config
        return replace(
            config,
            parallel=replace(config.parallel, zero=states.zero),
            offload=replace(
                config.offload,
                gradients=states.gradients,
                optimizer=states.optimizer,
                resolved=config.offload.resolved if rules is None else rules,
                policy=policy or config.offload.policy,
            ),
        )

    def _chosen[T](self, key: str, found: list[T]) -> list[T]:
        """What a person set, in place of what could be."""
        if key not in self.fixed:
            return found
        section, *names = key.split(".")
        value = getattr(self.config, section)
        for name in names:
            value = getattr(value, name)
        return [value]


def _grouped(layout: Layout, group: int) -> bool:
    """Whether the configuration's own groups of micro-batches are possible."""
    return layout.virtual > 1 and group >= layout.pipeline


def divisors(number: int) -> list[int]:
    """Ascending."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def policy_tiers(rules: Mapping[str, str]) -> set[str]:
    """Tiers that a policy uses."""
    return {storage.tier for storage in Policy.read(dict(rules)).values() if storage.tier is not None}


def allowed(rules: Mapping[str, str], allow: Sequence[str]) -> bool:
    """Whether a policy uses nothing but what `offload.allow` names. Unreadable ones are not."""
    try:
        storages = list(Policy.read(dict(rules)).values())
    except PolicyError:
        return False
    used = {storage.tier for storage in storages if storage.tier is not None}
    used |= {"fp8"} if any(storage.fp8 for storage in storages) else set()
    used |= {"recompute"} if any(storage.recompute for storage in storages) else set()
    return used <= set(allow)


def balanced(weights: Sequence[float], chunks: int) -> tuple[int, ...]:
    """Layers of each of `chunks` chunks, whose weights then have the least sum of squares."""
    layers = len(weights)
    before = np.concatenate(([0.0], np.cumsum(weights)))
    apart = (before[None, :] - before[:, None]) ** 2
    apart[np.tril_indices(layers + 1)] = np.inf
    best, choices = apart[0], []
    for _ in range(chunks - 1):
        sums = best[:, None] + apart
        choices.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    end, counts = layers, []
    for choice in reversed(choices):
        start = int(choice[end])
        counts.append(end - start)
        end = start
    return tuple(reversed([*counts, end]))

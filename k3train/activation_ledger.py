"""Bytes that a policy leaves between forwards and their backwards, by place, over a pipeline's operations.

Places are those of the manager: `device` (as they were saved, those on their way out among them), `fp8`,
`window` (brought back), and the tiers; `alone` is what it does not touch, integers and small tensors. A stage
is a model chunk; sizes are those of one micro-batch. Needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from offload.policy import KEEP, TIERS, Policy, Storage
from parallel.pipeline.rows import RowPlan
from parallel.pipeline.table import BACKWARD, FORWARD, VISION_BACKWARD, VISION_FORWARD, WEIGHT, Table

from . import activation_bytes
from .activation_policy import LAYER, MTP_LAYER, TOWER_LAYER, policy_of, policy_of_rank
from .activation_sites import Saved, is_region
from .config import Config
from .microbatch import element_bytes, row_bytes, tokens_per_microbatch
from .shapes import block_starts, layer_kinds, model_dtype
from .vision_shapes import Grid, patches
from .vision_shapes import tokens as vision_tokens

BANK = "attn_res.bank"
FP8_BYTES = 1 + 4 / 128
"""Of one element: its code, and its share of its block's scale."""
SPARE = 1.05
"""Room in a tier for more than is planned, such as experts that are not loaded evenly."""

Recomputed = Callable[[str], bool]
Held = Mapping[str, float]
"""Bytes by place."""


def recomputed(policy: Policy) -> Recomputed:
    """Whether a policy runs a site again; only regions can be."""
    return lambda site: is_region(site) and policy.storage(site).recompute


@dataclass
class Sizes:
    """Bytes of one site."""

    model: float = 0.0
    """Of the model's dtype, which FP8 may stand for."""
    exact: float = 0.0
    """Of other ones."""
    alone: float = 0.0
    """What the manager leaves where it is."""

    def add(self, tensor: Saved, count: float, smallest: float) -> None:
        """Count a tensor of `tensor.bytes`, as a whole, so many times."""
        kind = "alone" if tensor.kind == "index" or tensor.bytes < smallest else tensor.kind
        kind = "exact" if kind == "fp32" else kind
        setattr(self, kind, getattr(self, kind) + tensor.bytes * count)

    def coded(self, element: int) -> float:
        """As block-FP8."""
        return self.model / element * FP8_BYTES + self.exact

    @property
    def whole(self) -> float:
        """What the manager has to do with, as it was saved."""
        return self.model + self.exact


@dataclass
class Stage:
    """What a model chunk saves of a micro-batch."""

    tensors: Counter[Saved] = field(default_factory=Counter)
    """With `bytes` of the whole micro-batch, and how often."""
    largest: dict[str, float] = field(default_factory=dict)
    """Bytes that running a region again makes at a time, by region."""

    def sizes(self, again: Recomputed, smallest: float) -> dict[str, Sizes]:
        """Of every site that holds something."""
        found: dict[str, Sizes] = {}
        for tensor, count in self.tensors.items():
            if tensor.is_held(again):
                found.setdefault(tensor.site, Sizes()).add(tensor, count, smallest)
        return found

    def workspace(self, again: Recomputed) -> float:
        """The most that is there at a time because a region runs again."""
        return max((size for region, size in self.largest.items() if again(region)), default=0.0)


def stages(config: Config, cuts: Sequence[range], rows: RowPlan) -> list[Stage]:
    """Every model chunk, in the order of the forward pass."""
    layered, mtp_layered = (policy_of(config).storage(site).recompute for site in (LAYER, MTP_LAYER))
    return build_stages(config, cuts, rows, layered=layered, mtp_layered=mtp_layered)


def build_stages(
    config: Config, cuts: Sequence[range], rows: RowPlan, *, layered: bool, mtp_layered: bool
) -> list[Stage]:
    """The same where whole layers are run again, or the MTP layer, or are not."""
    builder = _Builder(config, layered, mtp_layered)
    return [
        builder.stage(layers, rows.width(number) if number else 1, is_last=number == len(cuts) - 1)
        for number, layers in enumerate(cuts)
    ]


class _Builder:
    """Gathers what stages save; equal layers are looked at once."""

    def __init__(self, config: Config, layered: bool, mtp_layered: bool) -> None:
        self.config, self.layered, self.mtp_layered = config, layered, mtp_layered
        self.device = activation_bytes.device_type(config)
        self.group = config.offload.recompute_layers if layered else 1
        self.kinds = layer_kinds(config.model)
        self.known: dict[object, tuple[Saved, ...]] = {}

    def stage(self, layers: range, width: int, *, is_last: bool) -> Stage:
        """A chunk into which a message of `width` tensors comes."""
        stage = Stage()
        for first in layers[:: self.group]:
            group = range(first, min(first + self.group, layers.stop))
            (self._add_again if self.layered else self._add)(stage, group)
        if is_last:
            self._add_end(stage)
        if width > 1:
            self._add_message(stage, width, layers[0])
        return stage

    def layer(self, layer: int) -> tuple[Saved, ...]:
        """What a decoder layer saves when it is not run again."""
        model = self.config.model
        key = self.kinds[layer], block_starts(model, layer), block_starts(model, layer + 1)
        if key not in self.known:
            found = activation_bytes.decoder_layer(self.config, layer, self.device)
            self.known[key] = self._whole(found)
        return self.known[key]

    def _add(self, stage: Stage, group: range) -> None:
        for layer in group:
            stage.tensors.update(self.layer(layer))
            _note_regions(stage, self.layer(layer))

    def _add_again(self, stage: Stage, group: range) -> None:
        """Layers that are run again together: the sum that enters, and rows of the bank made inside."""
        for layer in group:
            if layer == group[0] or self._starts_block(layer):
                stage.tensors[self._row(self._entry_site(layer))] += 1
        made = sum(_all_kept(self.layer(layer)) for layer in group)
        stage.largest[LAYER] = max(stage.largest.get(LAYER, 0), made)

    def _add_end(self, stage: Stage) -> None:
        """What stands behind the last layer."""
        behind = self._whole(activation_bytes.output(self.config, self.device))
        ahead = self._whole(activation_bytes.mtp(self.config, self.device))
        if ahead and self.mtp_layered:
            names = [tensor.what for tensor in ahead]
            start, end = names.index("input of the layer"), names.index("output of the layer")
            stage.largest[MTP_LAYER] = _all_kept(ahead[start:end])
            ahead = (*ahead[:start], self._row(MTP_LAYER), *ahead[end:])
        stage.tensors.update([*behind, *ahead])
        _note_regions(stage, [*behind, *ahead])

    def _add_message(self, stage: Stage, width: int, first: int) -> None:
        """What arrives is one storage: with rows of the bank in it all of it is theirs.

        The running sum in it has been counted with the first layer.
        """
        stage.tensors[self._row(BANK, width)] += 1
        if self.layered:
            stage.tensors[self._row(self._entry_site(first))] -= 1
        else:
            stage.tensors[next(t for t in self.layer(first) if t.what == "running sum")] -= 1

    def _entry_site(self, layer: int) -> str:
        return BANK if self._starts_block(layer) else LAYER

    def _starts_block(self, layer: int) -> bool:
        model = self.config.model
        return block_starts(model, layer + 1) > block_starts(model, layer)

    def _row(self, site: str, count: int = 1) -> Saved:
        return Saved(site, "rows", row_bytes(self.config) * count, "model", None, (BANK,), ())

    def _whole(self, tensors: Iterable[Saved]) -> tuple[Saved, ...]:
        return _times(tensors, tokens_per_microbatch(self.config))


def _all_kept(tensors: Iterable[Saved]) -> float:
    """What is made where nothing of a layer is run again, but for the sum that enters."""
    made = (t for t in tensors if t.is_held(lambda _: False) and t.what != "running sum")
    return sum(tensor.bytes for tensor in made)


def _note_regions(stage: Stage, tensors: Iterable[Saved]) -> None:
    made: dict[str, float] = defaultdict(float)
    for tensor in tensors:
        if tensor.made_in is not None:
            made[tensor.made_in] += tensor.bytes
    for region, size in made.items():
        stage.largest[region] = max(stage.largest.get(region, 0), size)


def _times(tensors: Iterable[Saved], count: int) -> tuple[Saved, ...]:
    return tuple(replace(tensor, bytes=tensor.bytes * count) for tensor in tensors)


def places(sizes: Mapping[str, Sizes], policy: Policy, element: int) -> dict[str, float]:
    """Bytes of one micro-batch by place."""
    held: dict[str, float] = defaultdict(float)
    for site, size in sizes.items():
        storage = policy.storage(site)
        held["alone"] += size.alone
        held[place(storage)] += moved(size, storage, element)
        if storage.fp8 and storage.tier is None:
            held["device"] += size.exact
    return held


def place(storage: Storage) -> str:
    """Where a site's tensors are."""
    return storage.tier or ("fp8" if storage.fp8 else "device")


def moved(size: Sizes, storage: Storage, element: int) -> float:
    """Bytes of a site's tensors at their place."""
    if storage.tier is None:
        return size.model / element * FP8_BYTES if storage.fp8 else size.whole
    return size.coded(element) if storage.fp8 else size.whole


def tower(config: Config, part: Sequence[Grid]) -> Stage:
    """What the vision tower saves of the items of one part."""
    vision, dtype = config.vision, model_dtype(config.model)
    device, rows = activation_bytes.device_type(config), sum(map(patches, part))
    block = _times(activation_bytes.tower_block(vision, dtype, device), rows)
    ends = _times(activation_bytes.tower_ends(vision, dtype, device), rows)
    made = sum(vision_tokens(vision, grid) for grid in part)
    projector = activation_bytes.projector(vision, config.model.hidden_size, dtype, device)
    positions = activation_bytes.tower_positions(vision, (grid for grid, _ in groupby(part)))
    stage = Stage(Counter([*ends, *positions, *_times(projector, made)]))
    if policy_of(config).storage(TOWER_LAYER).recompute:
        row = float(rows * vision.hidden_size * element_bytes(config.model))
        stage.tensors[Saved(TOWER_LAYER, "rows", row, "model", None, (BANK,), ())] += vision.depth
        stage.largest[TOWER_LAYER] = _all_kept(block)
    else:
        for tensor in block:
            stage.tensors[tensor] += vision.depth
        _note_regions(stage, block)
    return stage


def stage_places(config: Config, stage: Stage, rank: int) -> dict[str, float]:
    """What a forward of a stage, or of a part of the tower, leaves on a pipeline rank, by place."""
    policy = policy_of_rank(config, rank)
    sizes = stage.sizes(recomputed(policy), config.offload.min_kib << 10)
    held = places(sizes, policy, element_bytes(config.model))
    bank = sizes.get(BANK)
    if bank is not None and policy.storage(BANK) == KEEP:
        # A line of its own in the ledger; the manager counts it under `device`.
        held["bank"] += bank.whole
        held["device"] -= bank.whole
    return held


def tower_places(config: Config, parts: Sequence[Sequence[Sequence[Grid]]], rank: int) -> list[list[Held]]:
    """The same of every part of the tower's work; equal parts are looked at once."""
    known: dict[tuple[Grid, ...], Held] = {}

    def look(part: Sequence[Grid]) -> Held:
        key = tuple(part)
        if key not in known:
            known[key] = stage_places(config, tower(config, part), rank)
        return known[key]

    return [[look(part) for part in row] for row in parts]


Tower = Sequence[Sequence[Held]]
"""Of each part of each micro-batch's images, by place."""


def series(table: Table, rank: int, held: Sequence[Held], tower: Tower = ()) -> list[dict[str, float]]:
    """What a rank holds behind each of its operations, by place; `held` are the stages'."""
    last = WEIGHT if table.splits_backward else BACKWARD
    signs = {FORWARD: 1, last: -1, VISION_FORWARD: 1, VISION_BACKWARD: -1}
    now: dict[str, float] = defaultdict(float)
    found = []
    for op in table.ranks[rank]:
        sign = signs.get(op.kind, 0)
        if sign:
            in_tower = op.kind in (VISION_FORWARD, VISION_BACKWARD)
            part = tower[op.microbatch][op.chunk] if in_tower else held[table.layout.stage(rank, op.chunk)]
            for name, nbytes in part.items():
                now[name] += sign * nbytes
        found.append(dict(now))
    return found


def with_capacities(held: Held, capacities: Mapping[str, float]) -> dict[str, float]:
    """The same where tiers are full: what has no room goes on to the host, and from there to the device."""
    found: dict[str, float] = defaultdict(float, held)
    for tier in ("nvme", "peer", "host"):
        over = max(0.0, found[tier] - capacities.get(tier, math.inf))
        found[tier] -= over
        found["device" if tier == "host" else "host"] += over
    return found


def as_measured(held: Held, window: float) -> dict[str, float]:
    """By the manager's places: those on their way out are on the device too, as far as the window goes."""
    away = sum(held.get(tier, 0.0) for tier in TIERS)
    device = held.get("device", 0.0) + held.get("bank", 0.0) + min(window, away)
    return {"device": device, **{name: held[name] for name in ("fp8", *TIERS) if name in held}}

"""Puts the vision tower's work into the bubbles of a pipeline. Imports no torch.

Every rank holds the tower. The images of a micro-batch are cut into parts; part j of micro-batch k has a
forward VF(j, k), needed by F(0, k), and a backward VB(j, k), which waits for B(0, k), both on one rank, where
its activations stay. Letters: p pipeline ranks, m micro-batches, T length of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from itertools import accumulate

from .insertion import SLACK, Network, Part, Rule, Ticks
from .simulate import Costs, Timeline, recalled, simulate
from .table import BACKWARD, FORWARD, VISION_BACKWARD, VISION_FORWARD, Op, Table
from .vision_dispatch import dispatch

EFFORT = 10_000_000
"""Operations times parts times variants that one fill may touch; bounds its time to a few seconds."""

PLAIN = 8
"""Variants without a cap: four orders of the micro-batches, two rules for ties."""

POLISHED, PASSES = 4, 2
"""Of the best variants this many are gone over again, so often. A pass costs about twice a variant."""

NEGLIGIBLE = 1e-3
"""A simple fill of a large table is taken where no other could make the step shorter by more than this share:
none makes it shorter than the language model's alone."""

INNER_PARTS = 4
"""Most parts of a micro-batch whose tower work can hide: neither among the first p nor among the last p."""

BISECTIONS, MOST_ADDED = 7, 1.25
"""Search of the time that a rigid fill adds; its upper end leaves room for uneven parts."""

WINDOW, FULL = 2, 0.9
"""Bubbles of a large table count as full once `WINDOW` parts a rank add this share of their own time."""

Sizes = Sequence[Sequence[float]]
Progress = Callable[[int, int], None]
Ranks = tuple[tuple[Op, ...], ...]
Variant = tuple[list[Part], Rule]

RULES: tuple[Rule, ...] = ("early", "late")
"""Of a fill without a cap; "near" holds activations for as short a time as it can."""


class CapError(ValueError):
    """No fill that was tried keeps the cap on vision activations."""


def fill(
    table: Table,
    costs: Costs,
    *,
    cap: float | None = None,
    sizes: Sizes | None = None,
    progress: Progress | None = None,
) -> Table:
    """Insert the tower's operations so that the step grows least.

    The best of a portfolio: insertion by heads and tails in eight variants (four orders of the micro-batches,
    two rules for ties), the best four of them polished (each part taken out and placed again), gaps of the
    unchanged timeline filled earliest deadline first, and the separate `phase`. Large tables get fewer
    variants and no polish (`EFFORT`), the largest one variant, and that only until the bubbles are full
    (`WINDOW`). Before all that, large tables are filled in one pass (`vision_dispatch`), which is taken if no
    fill could be noticeably shorter (`NEGLIGIBLE`), else it is one of the portfolio. A cap adds up to six
    variants, four that hold activations for as short a time as they can; on large tables it adds one, and
    where it fails a variant the next one is tried. Of equal lengths the one that holds fewer vision
    activations wins. Deterministic.

    Args:
        table: of the language model alone, before `with_reductions` and `with_activation_moves`.
        costs: with `vision_forward` and `vision_backward` of each part; a micro-batch may have none.
        cap: most that a rank may hold of the tower's activations, from VF to VB, in units of `sizes`.
        sizes: what a part holds, by micro-batch and part; by default its share of the mean micro-batch's
            forward time, so that `cap` counts whole bundles of mean cost.
        progress: called with (parts placed, parts to place) over all variants.

    Raises:
        CapError: no variant keeps the cap; its message names one that can be kept, or of large tables what
            any needs.
    """
    counts = _counts(table, costs)
    if not sum(counts):
        return replace(table, parts=counts)
    sizes = default_sizes(costs) if sizes is None else sizes
    candidates = []
    if _is_large(sum(map(len, table.ranks)) * sum(counts)):
        least = _least_peak(table, sizes)
        if cap is not None and least > cap * (1 + SLACK):
            raise CapError(f"cap={cap:g}: some rank has to hold {least:g}; allow more than that")
        candidates = _dispatched(table, costs, cap, sizes)
        if candidates and _is_enough(candidates[0], table, costs):
            return candidates[0]
    network = Network(table, ticks := Ticks.of(table, costs, sizes))
    candidates += [
        replace(table, ranks=ranks, parts=counts, name=f"{table.name} + vision in bubbles")
        for ranks in _portfolio(network, ticks.parts, cap, progress)
    ]
    candidates.append(phase(table, costs))
    peaks = [max(vision_peaks(candidate, sizes)) for candidate in candidates]
    allowed = [
        (candidate, peak)
        for candidate, peak in zip(candidates, peaks, strict=True)
        if cap is None or peak <= cap * (1 + SLACK)
    ]
    if not allowed:
        least = min(peaks)
        raise CapError(f"cap={cap:g}: a rank would hold {least:g}; allow that, or cut images into more parts")
    return min(allowed, key=lambda pair: (_rounded(simulate(pair[0], costs).makespan), pair[1]))[0]


def _is_large(effort: int) -> bool:
    """Whether not all variants can be gone over again; `effort` is operations times parts."""
    return effort * (PLAIN + 2 * POLISHED * PASSES) > EFFORT


def _dispatched(table: Table, costs: Costs, cap: float | None, sizes: Sizes) -> list[Table]:
    """A fill in one pass, if the cap leaves one."""
    ranks = dispatch(table, costs, float("inf") if cap is None else cap * (1 + SLACK), sizes)
    name, parts = f"{table.name} + vision in bubbles", _counts(table, costs)
    return [] if ranks is None else [replace(table, ranks=ranks, parts=parts, name=name)]


def _least_peak(table: Table, sizes: Sizes) -> float:
    """What the rank that holds most has to hold: an even share of the images of all micro-batches that the
    first stage has run forward and not yet backward."""
    first, held, most = table.layout.home(0)[0], 0.0, 0.0
    for op in table.ranks[first]:
        if op.chunk == 0 and op.kind in (FORWARD, BACKWARD):
            held += sum(sizes[op.microbatch]) * (1 if op.kind == FORWARD else -1)
            most = max(most, held)
    return most / table.layout.pipeline


def _is_enough(filled: Table, table: Table, costs: Costs) -> bool:
    """Whether next to nothing can be better."""
    alone = recalled(table, replace(costs, vision_forward=(), vision_backward=())).makespan
    return bool(recalled(filled, costs).makespan <= alone * (1 + NEGLIGIBLE))


def inline(table: Table, parts: Sequence[int]) -> Table:
    """The tower on the rank of stage 0: VF right before F(0, k), VB right after B(0, k)."""
    first = table.layout.home(0)[0]

    def extended(op: Op) -> Iterator[Op]:
        here = range(parts[op.microbatch]) if op.chunk == 0 else range(0)
        if op.kind == FORWARD:
            yield from (Op(VISION_FORWARD, part, op.microbatch) for part in here)
        yield op
        if op.kind == BACKWARD:
            yield from (Op(VISION_BACKWARD, part, op.microbatch) for part in here)

    ranks = tuple(
        tuple(new for op in ops for new in extended(op)) if rank == first else ops
        for rank, ops in enumerate(table.ranks)
    )
    return replace(table, ranks=ranks, parts=tuple(parts), name=f"{table.name} + vision in line")


def phase(table: Table, costs: Costs) -> Table:
    """All of the tower's forwards first and all its backwards last, both spread over the ranks by cost."""
    jobs = [
        (forward + backward, microbatch, part)
        for microbatch, rows in enumerate(zip(costs.vision_forward, costs.vision_backward, strict=True))
        for part, (forward, backward) in enumerate(zip(*rows, strict=True))
    ]
    name = f"{table.name} + separate vision phase"
    return replace(table, ranks=_spread(table.ranks, jobs), parts=_counts(table, costs), name=name)


def without_vision(table: Table) -> Table:
    """The language model's part of a table."""
    vision = (VISION_FORWARD, VISION_BACKWARD)
    ranks = tuple(tuple(op for op in ops if op.kind not in vision) for ops in table.ranks)
    return replace(table, ranks=ranks, parts=())


def hidden_fraction(table: Table, costs: Costs) -> float:
    """Share of the tower's time that a step hides: 1 - (T - T without vision) / (tower's work / p).

    0: as long as with all of it balanced over the ranks before and after the language model; below 0: longer
    than that; 1: for nothing, and where there is no such work.
    """
    work = sum(map(sum, costs.vision_forward)) + sum(map(sum, costs.vision_backward))
    return hidden_share(simulate(table, costs), simulate(without_vision(table), costs), work)


def hidden_share(filled: Timeline, alone: Timeline, work: float) -> float:
    """`hidden_fraction` of timelines with and without the tower, whose operations take `work` in all."""
    if not work:
        return 1.0
    added = filled.makespan - alone.makespan
    return float(1 - added * filled.table.layout.pipeline / work)


def vision_peaks(table: Table, sizes: Sizes) -> list[float]:
    """Most that each rank holds of the tower's activations at once, from a part's VF to its VB."""
    signs = {VISION_FORWARD: 1, VISION_BACKWARD: -1}
    return [
        max(
            accumulate(
                (signs[op.kind] * sizes[op.microbatch][op.chunk] for op in ops if op.kind in signs), initial=0
            )
        )
        for ops in table.ranks
    ]


def default_sizes(costs: Costs) -> tuple[tuple[float, ...], ...]:
    """Forward time of each part over that of the mean micro-batch with images."""
    totals = [sum(row) for row in costs.vision_forward if len(row)]
    mean = sum(totals) / len(totals) if totals else 0
    return tuple(tuple(float(cost / mean) if mean else 0.0 for cost in row) for row in costs.vision_forward)


def split_parts(costs: Sequence[float], pieces: int) -> list[list[int]]:
    """Cut images into at most `pieces` parts of nearly equal cost, none empty.

    The costliest image goes first, each to the part that has least so far. Returns the indices of each part's
    images in ascending order, the parts in the order of their first image.
    """
    return sorted(_balanced(costs, min(pieces, len(costs))))


def plan_parts(images: Sequence[Sequence[float]], pipeline: int) -> list[list[list[int]]]:
    """Parts of each micro-batch: `images[k]` are the costs of its images; see `split_parts`.

    The first and the last p micro-batches, whose tower work the pipeline cannot hide entirely, are cut into
    up to p parts so that all ranks share it, the others into up to `INNER_PARTS`.
    """
    count = len(images)
    return [
        split_parts(
            costs, pipeline if min(index, count - 1 - index) < pipeline else min(pipeline, INNER_PARTS)
        )
        for index, costs in enumerate(images)
    ]


def _balanced(costs: Sequence[float], groups: int) -> list[list[int]]:
    """Longest first into the least loaded group; indices of each group in ascending order."""
    loads: list[tuple[float, int]] = [(0, group) for group in range(groups)]
    heapify(loads)
    chosen: list[list[int]] = [[] for _ in range(groups)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, group = loads[0]
        chosen[group].append(index)
        heapreplace(loads, (load + costs[index], group))
    return [sorted(group) for group in chosen]


def _spread(ranks: Ranks, jobs: Sequence[tuple[float, int, int]]) -> Ranks:
    """Add (cost, micro-batch, part), equally over the ranks: forwards before all but the tower's first ones,
    backwards after all but its last ones."""
    spread = []
    for ops, group in zip(ranks, _balanced([cost for cost, _, _ in jobs], len(ranks)), strict=True):
        first = next((index for index, op in enumerate(ops) if op.kind != VISION_FORWARD), 0)
        last = len(ops) - next((index for index, op in enumerate(ops[::-1]) if op.kind != VISION_BACKWARD), 0)
        ahead, back = (
            [Op(kind, part, microbatch) for _, microbatch, part in (jobs[job] for job in group)]
            for kind in (VISION_FORWARD, VISION_BACKWARD)
        )
        spread.append((*ops[:first], *ahead, *ops[first:last], *back, *ops[last:]))
    return tuple(spread)


def _counts(table: Table, costs: Costs) -> tuple[int, ...]:
    counts = tuple(map(len, costs.vision_forward))
    assert not table.parts and len(counts) == table.layout.microbatches, (table.name, counts)
    return counts


def _rounded(time: float) -> float:
    """Sums of floats in another order are no difference."""
    return float(f"{float(time):.9g}")


def _orders(parts: Sequence[Part]) -> list[list[Part]]:
    """From both ends inward, outward, ascending, descending in micro-batches."""
    last = max(part.microbatch for part in parts)
    inward = sorted(parts, key=lambda part: (min(part.microbatch, last - part.microbatch), part))
    outward = sorted(parts, key=lambda part: (-min(part.microbatch, last - part.microbatch), part))
    return [inward, outward, sorted(parts), sorted(parts, key=lambda part: (-part.microbatch, part.part))]


class _Count:
    """Reports parts placed out of those of all variants."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done, self.progress = total, 0, progress

    def __call__(self, done: int | None = None) -> None:
        """One more, or as many as `done`; what is placed a second time counts once."""
        self.done = max(self.done, self.done + 1 if done is None else done)
        if self.progress:
            self.progress(self.done, self.total)


def _variants(parts: Sequence[Part], effort: int, cap: float | None) -> tuple[list[Variant], int]:
    """Variants by rank, and how many of them to grow: where a cap fails one, the next takes its place."""
    inward, outward, rising, falling = orders = _orders(parts)
    plain: list[Variant] = [(order, rule) for rule in RULES for order in orders]
    assert len(plain) == PLAIN
    affordable = min(PLAIN, max(1, EFFORT // effort))
    if cap is None:
        return plain[:affordable], affordable
    # On large tables with a cap that binds, one of the first four was always as short as the best of all, and
    # the fifth often as short with fewer activations.
    first: list[Variant] = [(inward, "early"), (inward, "near"), (outward, "near"), (rising, "late")]
    first += [(rising, "near"), (falling, "near")]
    every = [*first, *(variant for variant in plain if variant not in first)]
    return every, affordable + 1 if affordable < PLAIN else len(every)


def _portfolio(
    network: Network, parts: Sequence[Part], cap: float | None, progress: Progress | None
) -> Iterator[Ranks]:
    """Filled ranks of all variants but the separate phase."""
    effort = len(network.ops) * len(parts)
    variants, wanted = _variants(parts, effort, cap)
    polished = 0 if _is_large(effort) else POLISHED
    if wanted == 1:
        count = _Count(len(parts), progress)
        yield _until_full(network, *variants[0], count)
        yield from _rigid_fills(network, [variants[0][0]])
        count(count.total)
        return
    count = _Count((wanted + polished * PASSES + 1) * len(parts), progress)
    grown: list[tuple[Network, list[Part], Rule]] = []
    for order, rule in variants:
        filled, before = network.copy(), len(parts) * len(grown)
        for number, part in enumerate(order, 1):
            if not filled.place(part, rule, cap):
                break
            count(before + number)
        else:
            grown.append((filled, order, rule))
        if len(grown) == wanted:
            break
    count(len(parts) * wanted)
    grown.sort(key=lambda variant: variant[0].makespan)
    yield from (filled.ranks() for filled, _, _ in grown)
    if grown and grown[0][0].makespan > _least_makespan(network, parts):
        for filled, order, rule in grown[:polished]:
            yield _polished(filled, order, rule, cap, count)
    if cap is not None and not grown:
        loose = network.copy()
        for part in sorted(parts):
            loose.place(part, "near", None)
        yield loose.ranks()
    yield from _rigid_fills(network, _orders(parts)[:2])
    count(count.total)


def _until_full(network: Network, order: Sequence[Part], rule: Rule, count: _Count) -> Ranks:
    """Insert until the bubbles are full, that is until a window of parts makes the step as much longer as it
    would when spread over the ranks; then spread the rest."""
    grown, window = network.copy(), WINDOW * network.pipeline
    rest: Sequence[Part] = order
    while rest:
        now, rest, length = rest[:window], rest[window:], grown.makespan
        for part in now:
            grown.place(part, rule, None)
            count()
        work = sum(part.forward + part.backward for part in now)
        if (grown.makespan - length) * network.pipeline >= FULL * work:
            break
    return _spread(
        grown.ranks(), [(part.forward + part.backward, part.microbatch, part.part) for part in sorted(rest)]
    )


def _polished(network: Network, order: Sequence[Part], rule: Rule, cap: float | None, count: _Count) -> Ranks:
    """Take each part out and place it again, `PASSES` times; the shortest step met on the way."""
    best, ranks = network.makespan, network.ranks()
    for part in [*order] * PASSES:
        network.remove(part)
        if not network.place(part, rule, cap):
            break
        if network.makespan < best:
            best, ranks = network.makespan, network.ranks()
        count()
    return ranks


def _least_makespan(network: Network, parts: Sequence[Part]) -> int:
    """A step that only waits for the images of one micro-batch at its start, and of one at its end."""
    before, after = 0, 0
    for microbatch in {part.microbatch for part in parts}:
        own = [part for part in parts if part.microbatch == microbatch]
        ahead = max(*(part.forward for part in own), sum(part.forward for part in own) // network.pipeline)
        back = max(*(part.backward for part in own), sum(part.backward for part in own) // network.pipeline)
        before = max(before, ahead + network.tails.values[network.entrance[microbatch]] - network.makespan)
        after = max(after, back + network.heads.values[network.exit[microbatch]] - network.makespan)
    return network.makespan + before + after


@dataclass
class _Gap:
    """Idle time of a rank before its operation `slot`: forwards at its start, backwards at its end."""

    start: int
    end: int
    slot: int
    forwards: list[Op] = field(default_factory=list)
    backwards: list[Op] = field(default_factory=list)


def _rigid_fills(network: Network, orders: Sequence[Sequence[Part]]) -> Iterator[Ranks]:
    """Fill gaps of the unchanged timeline, with as little time as possible added before and after it."""
    for parts in orders:
        low, high = 0.0, MOST_ADDED
        best = _rigid(network, parts, high)
        for _ in range(BISECTIONS if best else 0):
            middle = (low + high) / 2
            ranks = _rigid(network, parts, middle)
            if ranks is None:
                low = middle
            else:
                best, high = ranks, middle
        if best:
            yield best


def _rigid(network: Network, parts: Sequence[Part], added: float) -> Ranks | None:
    """Place each part in its earliest forward gap and its latest backward gap, on the rank whose forward ends
    first. `added`: time before and after, in units of the tower's work over all ranks. None: something fits
    nowhere."""
    ahead = int(added * sum(part.forward for part in parts) / network.pipeline)
    behind = int(added * sum(part.backward for part in parts) / network.pipeline)
    gaps = [_gaps(network, rank, ahead, behind) for rank in range(network.pipeline)]
    for part in parts:
        entrance, leaving = network.entrance[part.microbatch], network.exit[part.microbatch]
        best: tuple[int, int, _Gap, _Gap] | None = None
        for rank, row in enumerate(gaps):
            lag = 0 if rank == network.first_rank else network.hop
            deadline = network.start(entrance) - lag
            release = network.heads.values[leaving] + lag
            first = next((gap for gap in row if min(gap.end, deadline) - gap.start >= part.forward), None)
            last = next(
                (gap for gap in reversed(row) if gap.end - max(gap.start, release) >= part.backward), None
            )
            if first and last and (best is None or (first.start, -last.end) < best[:2]):
                best = first.start, -last.end, first, last
        if best is None:
            return None
        _, _, first, last = best
        forward, backward = part.ops
        first.forwards.append(forward)
        first.start += part.forward
        last.backwards.append(backward)
        last.end -= part.backward
    return tuple(_merged(network, rank, row) for rank, row in enumerate(gaps))


def _gaps(network: Network, rank: int, ahead: int, behind: int) -> list[_Gap]:
    nodes = network.order[rank]
    starts = [*map(network.start, nodes), network.makespan + behind]
    ends = [-ahead, *(network.heads.values[node] for node in nodes)]
    return [
        _Gap(start, end, slot)
        for slot, (start, end) in enumerate(zip(ends, starts, strict=True))
        if end > start
    ]


def _merged(network: Network, rank: int, gaps: Sequence[_Gap]) -> tuple[Op, ...]:
    by_slot = {gap.slot: [*gap.forwards, *reversed(gap.backwards)] for gap in gaps}
    ops = [network.ops[node] for node in network.order[rank]]
    merged = [new for slot, op in enumerate(ops) for new in (*by_slot.get(slot, ()), op)]
    return (*merged, *by_slot.get(len(ops), ()))

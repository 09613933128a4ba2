"""Letters: p pipeline ranks, m micro-batches, s parts of a micro-batch, H hidden fraction; v = 2 chunks."""

import random
from fractions import Fraction
from itertools import chain
from typing import Any

import pytest

from parallel.pipeline import vision_fill
from parallel.pipeline.build import build
from parallel.pipeline.check import check
from parallel.pipeline.insertion import Network, Ticks
from parallel.pipeline.simulate import Costs, simulate, uniform
from parallel.pipeline.table import VISION_BACKWARD, VISION_FORWARD, Op, Table
from parallel.pipeline.vision_fill import (
    CapError,
    default_sizes,
    fill,
    hidden_fraction,
    inline,
    phase,
    plan_parts,
    split_parts,
    vision_peaks,
    without_vision,
)

# H of the feasibility study for equal bundles by (p, m, percent of the language model's time, s).
STUDY = {
    (4, 16, 2, 1): 0.75, (4, 16, 2, 4): 0.94, (4, 16, 10, 1): 0.75, (4, 16, 10, 4): 0.85,
    (4, 16, 40, 1): 0.16, (4, 16, 40, 4): 0.20, (8, 16, 2, 1): 0.50, (8, 16, 2, 4): 0.88,
    (8, 16, 10, 1): 0.50, (8, 16, 10, 4): 0.87, (8, 16, 40, 1): 0.15, (8, 16, 40, 4): 0.41,
    (8, 32, 2, 1): 0.75, (8, 32, 2, 4): 0.94, (8, 32, 10, 1): 0.75,
    (8, 32, 40, 1): 0.08,
}  # fmt: skip


def bundles(
    p: int, m: int, percent: int, s: int, hop: Fraction | int = 0, schedule: str = "interleaved"
) -> tuple[Table, Costs]:
    """A language model of unit forwards and equal bundles of `percent` of its time in s parts each."""
    table = build(schedule, p, 1 if schedule in ("1f1b", "zb1p") else 2, m)
    forward = Fraction(percent * p * table.layout.virtual, 100 * s)
    costs = uniform(table.layout, parts=[s] * m, vision_forward=forward, vision_backward=2 * forward, hop=hop)
    return table, costs


def uneven(table: Table, counts: list[int], seed: int) -> Costs:
    """Lognormal parts, `counts[k]` in micro-batch k, a tenth of a forward in the median."""
    draw = random.Random(seed)
    forward = [[draw.lognormvariate(-2.3, 0.8) for _ in range(count)] for count in counts]
    stages = table.layout.stages
    return Costs([1] * stages, [2] * stages, [1] * stages, forward, [[2 * x for x in row] for row in forward])


def assert_sound(table: Table, filled: Table, costs: Costs) -> None:
    """Each part once, both operations on one rank, the language model's order kept, proved and simulated."""
    check(filled)
    assert filled.parts == tuple(map(len, costs.vision_forward))
    assert without_vision(filled).ranks == table.ranks
    expected = sorted((k, j) for k, count in enumerate(filled.parts) for j in range(count))
    places = {
        kind: sorted(
            (op.microbatch, op.chunk, rank)
            for rank, ops in enumerate(filled.ranks)
            for op in ops
            if op.kind == kind
        )
        for kind in (VISION_FORWARD, VISION_BACKWARD)
    }
    assert places[VISION_FORWARD] == places[VISION_BACKWARD]
    assert [place[:2] for place in places[VISION_FORWARD]] == expected


@pytest.mark.parametrize(("case", "study"), STUDY.items())
def test_hides_as_much_as_the_study(case: tuple[int, int, int, int], study: float) -> None:
    table, costs = bundles(*case)
    filled = fill(table, costs)
    assert_sound(table, filled, costs)
    assert hidden_fraction(filled, costs) >= study - 0.01
    assert simulate(filled, costs).makespan <= simulate(phase(table, costs), costs).makespan


def test_lengths_of_the_three_modes() -> None:
    table, costs = bundles(8, 32, 10, 4)
    modes = fill(table, costs), phase(table, costs), inline(table, [4] * 32)
    lengths = [float(simulate(mode, costs).makespan) for mode in modes]
    assert simulate(table, costs).makespan == 213
    assert lengths == pytest.approx([214.2, 232.2, 345.6])
    for mode in modes:
        assert_sound(table, mode, costs)
    assert hidden_fraction(modes[1], costs) == 0


def test_a_part_is_hidden_up_to_the_two_ends() -> None:
    # Bound of equal bundles of s parts: the first forward and the last backward are exposed.
    table, costs = bundles(4, 16, 2, 4)
    assert hidden_fraction(fill(table, costs), costs) == 1 - 4 / (16 * 4)


@pytest.mark.parametrize("hop", [0, Fraction(1, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb1p", "zbv"])
def test_network_agrees_with_the_simulator_after_each_insertion(schedule: str, hop: Fraction | int) -> None:
    table, costs = bundles(4, 8, 15, 3, hop, schedule)
    network = Network(table, ticks := Ticks.of(table, costs, default_sizes(costs)))
    counts = [0] * 8
    for index, part in enumerate(ticks.parts):
        network.place(part, ("early", "late", "near")[index % 3], cap=None)
        counts[part.microbatch] += 1
        timeline = simulate(Table(table.layout, network.ranks(), parts=tuple(counts)), costs)
        unit = Fraction(network.makespan) / timeline.makespan
        for rank, nodes in enumerate(network.order):
            assert [network.heads.values[node] for node in nodes] == [
                end * unit for end in timeline.ends[rank]
            ]
    length = network.makespan
    network.remove(ticks.parts[5])
    assert network.place(ticks.parts[5], "early", cap=None)
    peaks = vision_peaks(Table(table.layout, network.ranks(), parts=(3,) * 8), default_sizes(costs))
    assert [network._levels(rank).max() for rank in range(4)] == pytest.approx(peaks)
    again = simulate(Table(table.layout, network.ranks(), parts=(3,) * 8), costs).makespan
    assert network.makespan == again * unit and network.makespan <= 1.1 * length


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb1p", "zbv"])
def test_other_schedules_and_slow_messages(schedule: str) -> None:
    table, costs = bundles(4, 8, 5, 2, Fraction(1, 10), schedule)
    filled = fill(table, costs)
    assert_sound(table, filled, costs)
    assert hidden_fraction(filled, costs) > 0.4
    assert filled.name == f"{schedule} + vision in bubbles"


def test_a_cap_bounds_what_a_rank_holds() -> None:
    table, costs = bundles(4, 16, 10, 2)
    sizes = default_sizes(costs)
    assert sizes[0] == (0.5, 0.5)
    lengths, peaks = [], []
    for cap in (None, 4, 3.5, 3):
        filled = fill(table, costs, cap=cap)
        assert_sound(table, filled, costs)
        peaks.append(max(vision_peaks(filled, sizes)))
        lengths.append(simulate(filled, costs).makespan)
    assert peaks[0] > 4 and peaks[1:] == [4, 3.5, 3]
    assert lengths == sorted(lengths)
    megabytes = [[100.0, 50.0]] * 16
    assert max(vision_peaks(fill(table, costs, cap=450, sizes=megabytes), megabytes)) <= 450


def test_a_large_table_with_a_cap_gets_few_variants_and_others_where_those_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed: list[bool] = []
    place = Network.place

    def counted(self: Network, *args: Any) -> bool:
        placed.append(place(self, *args))
        return placed[-1]

    monkeypatch.setattr(Network, "place", counted)
    monkeypatch.setattr(vision_fill, "EFFORT", 3 * 300 * 32)
    table, costs = bundles(4, 16, 10, 2)
    free = fill(table, costs, cap=6)
    assert len(placed) == 4 * 32, "one more variant than without a cap, and no polish"
    assert hidden_fraction(free, costs) >= hidden_fraction(fill(table, costs), costs) - 0.05
    for cap in (4, 3.5, 3):
        placed.clear()
        tight = fill(table, costs, cap=cap)
        assert_sound(table, tight, costs)
        assert max(vision_peaks(tight, default_sizes(costs))) <= cap
    assert not all(placed), "at the least cap a variant fails"


def test_a_cap_that_cannot_be_kept_is_refused() -> None:
    table, costs = bundles(4, 8, 10, 2)
    with pytest.raises(CapError, match=r"cap=0.5: a rank would hold .* cut images into more parts"):
        fill(table, costs, cap=0.5)


@pytest.mark.parametrize("seed", range(3))
def test_uneven_bundles_and_microbatches_without_images(seed: int) -> None:
    table = build("interleaved", 4, 2, 16)
    draw = random.Random(seed)
    costs = uneven(table, [draw.randrange(5) for _ in range(16)], seed)
    filled = fill(table, costs)
    assert 0 in filled.parts
    assert_sound(table, filled, costs)
    assert hidden_fraction(filled, costs) > 0.5
    assert hidden_fraction(filled, costs) >= hidden_fraction(phase(table, costs), costs)


def test_text_only() -> None:
    table = build("interleaved", 2, 2, 4)
    costs = uneven(table, [0] * 4, 0)
    filled = fill(table, costs)
    assert filled.ranks == table.ranks and filled.parts == (0, 0, 0, 0)
    assert hidden_fraction(filled, costs) == 1


def test_one_rank_hides_nothing() -> None:
    table = build("1f1b", 1, 1, 4)
    costs = uneven(table, [2] * 4, 0)
    filled = fill(table, costs)
    assert_sound(table, filled, costs)
    assert hidden_fraction(filled, costs) == pytest.approx(0, abs=1e-9)


def test_more_images_never_make_the_step_shorter_and_overflow_once() -> None:
    p, m, image = 4, 12, Fraction(1, 4)
    table = build("interleaved", p, 2, m)
    lengths, fits = [], []
    for images in (2, 4, 6, 9):
        parts = plan_parts([[image] * images] * m, p)
        forward = [[len(part) * image for part in bundle] for bundle in parts]
        backward = [[2 * cost for cost in row] for row in forward]
        costs = Costs([1] * 8, [2] * 8, (), forward, backward)
        filled = fill(table, costs)
        lengths.append(simulate(filled, costs).makespan)
        fits.append(hidden_fraction(filled, costs) >= 0.8)
    assert lengths == sorted(lengths)
    assert fits == sorted(fits, reverse=True) and fits[0] and not fits[-1]


def test_tower_of_the_first_stage_in_line() -> None:
    table = inline(build("1f1b", 2, 1, 2), [2, 0])
    assert " ".join(map(str, table.ranks[0])) == "VF(0,0) VF(1,0) F(0,0) F(0,1) B(0,0) VB(0,0) VB(1,0) B(0,1)"
    assert all(op.kind in "FB" for op in table.ranks[1])
    assert table.parts == (2, 0)


def test_separate_phase_balances_by_cost() -> None:
    table = build("1f1b", 2, 1, 2)
    costs = Costs([1, 1], [2, 2], (), [[3, 1], [1, 1]], [[6, 2], [2, 2]])
    first, second = phase(table, costs).ranks
    assert first[0] == Op(VISION_FORWARD, 0, 0) and first[-1] == Op(VISION_BACKWARD, 0, 0)
    assert [op.microbatch for op in second if op.kind == VISION_FORWARD] == [0, 1, 1]
    assert hidden_fraction(phase(table, costs), costs) == 0


def test_a_large_table_is_filled_until_its_bubbles_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_fill, "EFFORT", 1)
    for percent, least in ((5, 0.87), (40, 0.17)):
        table, costs = bundles(4, 16, percent, 4)
        filled = fill(table, costs)
        assert_sound(table, filled, costs)
        assert hidden_fraction(filled, costs) >= least


def test_progress_grows_to_its_total_and_the_result_is_deterministic() -> None:
    table, costs = bundles(4, 8, 20, 2)
    seen: list[tuple[int, int]] = []
    first = fill(table, costs, progress=lambda done, total: seen.append((done, total)))
    done = [entry[0] for entry in seen]
    assert done == sorted(done) and len({total for _, total in seen}) == 1 and seen[-1][0] == seen[-1][1]
    assert fill(table, costs) == first


def test_images_are_cut_into_parts_of_nearly_equal_cost() -> None:
    assert split_parts([1, 9, 2, 3, 3], 2) == [[0, 2, 3, 4], [1]]
    assert split_parts([5, 5, 5], 8) == [[0], [1], [2]]
    assert split_parts([], 4) == []
    assert split_parts([0, 0, 1], 2) == [[0, 1], [2]]


def test_the_ends_of_a_step_are_cut_finest() -> None:
    planned = plan_parts([[1.0] * 8] * 3 + [[]] + [[1.0] * 8] * 16, 6)
    assert [len(parts) for parts in planned] == [6, 6, 6, 0, 6, 6] + [4] * 8 + [6] * 6
    assert all(sorted(chain.from_iterable(parts)) == list(range(8)) for parts in planned if parts)

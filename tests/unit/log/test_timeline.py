import json

import pytest

from k3train.errors import UserError
from k3train.log.timeline import Recording, compare, median_costs, read, vision_seconds, write
from parallel.pipeline.build import build, with_reductions
from parallel.pipeline.simulate import Costs, simulate
from parallel.pipeline.vision_fill import fill

COSTS = Costs(
    forward=[1.0, 2.0, 1.5, 1.0], backward=[2.0, 4.0, 3.0, 5.0], weight=[1.0, 2.0, 1.0, 2.0], reduce=0.5
)


def record(schedule="interleaved", costs=COSTS, *, speeds=(1.0,), late=100.0, reduce=False) -> Recording:
    """Steps whose operations took `costs` times each speed."""
    virtual = 1 if schedule in ("1f1b", "zb1p") else 2
    pipeline = len(costs.forward) // virtual
    table = build(schedule, pipeline, virtual, 8)
    timeline = simulate(with_reductions(table) if reduce else table, costs)
    steps = {
        step: [
            [
                (*op, late + start * speed, late + end * speed)
                for op, start, end in zip(ops, timeline.starts[rank], timeline.ends[rank], strict=True)
            ]
            for rank, ops in enumerate(timeline.table.ranks)
        ]
        for step, speed in enumerate(speeds, 3)
    }
    return Recording(table.layout, schedule, steps)


def test_what_is_written_is_read(tmp_path) -> None:
    recording = record("zbv", speeds=(1.0, 2.0))
    write(tmp_path, recording)
    content = json.loads((tmp_path / "timeline.json").read_text())
    assert [content[name] for name in ("schema", "pipeline", "virtual", "microbatches")] == [1, 2, 2, 8]
    assert [entry["step"] for entry in content["steps"]] == [3, 4]
    again = read(tmp_path)
    assert again == recording
    assert again.layout.vee


def test_the_file_needs_only_the_sizes_and_the_steps() -> None:
    content = json.loads(json.dumps(record().to_json()))
    del content["schedule"], content["vee"]
    found = Recording.from_json(content)
    assert (found.schedule, found.layout.vee) == ("interleaved", False)


def test_a_step_starts_at_its_first_operation() -> None:
    recording = record()
    timeline = recording.timeline(3)
    assert timeline.starts[0][0] == 0
    expected = simulate(timeline.table, COSTS)
    assert timeline.makespan == pytest.approx(expected.makespan)
    assert timeline.idle(1) == pytest.approx(expected.idle(1))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb1p", "zbv"])
def test_medians_are_the_costs_that_were_recorded(schedule) -> None:
    recording = record(schedule, speeds=(1.0, 1.0, 9.0), reduce=True)
    costs = median_costs(recording)
    assert costs.forward == pytest.approx(COSTS.forward)
    assert costs.backward == pytest.approx(COSTS.backward)
    assert list(costs.weight) == pytest.approx(COSTS.weight if schedule.startswith("zb") else [])
    assert costs.reduce == pytest.approx(0.5)
    assert (costs.hop, costs.vision_forward) == (0, [])


def test_vision_has_a_median_for_each_part_of_a_micro_batch() -> None:
    recording = record("1f1b", Costs([1.0], [2.0]))
    steps = {
        step: [[("VF", 0, 0, 0.0, 1.0 * step), ("VF", 1, 0, 9.0, 9.5), ("VF", 0, 2, 10.0, 12.0), *ranks[0]]]
        for step, ranks in zip((1, 2, 6), list(recording.steps.values()) * 3, strict=True)
    }
    costs = median_costs(Recording(recording.layout, "1f1b", steps))
    assert costs.vision_forward == [[2.0, 0.5], [], [2.0], [], [], [], [], []]
    assert costs.vision_backward == []


def test_a_run_that_went_as_planned_differs_by_nothing() -> None:
    found = compare(record(speeds=(3.0, 1.0, 2.0)))
    assert found.measured.makespan == pytest.approx(2 * simulate(found.measured.table, COSTS).makespan)
    assert found.planned.makespan == pytest.approx(found.measured.makespan)
    assert found.points == pytest.approx(0, abs=1e-9)
    figures = json.loads(json.dumps(found.figures()))
    assert figures["planned_idle"] == pytest.approx(figures["measured_idle"])
    assert figures["measured_seconds"] == pytest.approx(found.measured.makespan)


def with_images(speeds=(1.0,)) -> Recording:
    """1F1B on two stages whose tower took 1 and 2 seconds a part, each step its own multiple of them."""
    table, steps = build("1f1b", 2, 1, 4), {}
    for step, speed in enumerate(speeds):
        parts = [2, 0, 1, 1] if step % 2 else [1, 1, 0, 2]
        costs = Costs(
            [1.0, 2.0], [2.0, 4.0], (), [[speed] * n for n in parts], [[2 * speed] * n for n in parts]
        )
        timeline = simulate(fill(table, costs), costs)
        steps[step] = [
            [(*op, start, end) for op, start, end in zip(*each, strict=True)]
            for each in zip(timeline.table.ranks, timeline.starts, timeline.ends, strict=True)
        ]
    return Recording(table.layout, "1f1b", steps)


def test_the_tower_of_a_micro_batch_takes_the_mean_of_the_median_step() -> None:
    assert vision_seconds(with_images((1.0, 3.0, 50.0))) == (3.0, 6.0)
    assert vision_seconds(record("1f1b")) is None


def test_images_that_differ_between_steps_are_planned_as_they_were() -> None:
    recording = with_images((3.0, 1.0, 2.0))
    found = compare(recording)
    assert found.measured.table.parts == (1, 1, 0, 2)
    assert found.planned.starts == tuple(tuple(pytest.approx(row) for row in found.measured.starts))
    assert found.planned.makespan == pytest.approx(found.measured.makespan)
    assert record("1f1b").timeline(3).table.parts == ()


def test_a_wait_is_the_difference() -> None:
    recording = record("1f1b")
    span = recording.timeline(3).makespan
    ranks = [list(events) for events in recording.steps[3]]
    kind, chunk, microbatch, start, end = ranks[0][-1]
    ranks[0][-1] = (kind, chunk, microbatch, start + span, end + span)
    found = compare(Recording(recording.layout, "1f1b", {3: ranks}))
    assert found.measured.makespan == pytest.approx(2 * span)
    busy = [span - recording.timeline(3).idle(rank) for rank in range(4)]
    assert found.measured_idle == pytest.approx([1 - part / (2 * span) for part in busy])
    differences = [abs(a - b) for a, b in zip(found.planned_idle, found.measured_idle, strict=True)]
    assert found.points == pytest.approx(100 * max(differences)) and found.points > 20


def no_schema(content):
    content["schema"] = 2


def no_steps(content):
    content["steps"] = []


def a_rank_less(content):
    content["steps"][0]["ranks"].pop()


def a_forward_less(content):
    content["steps"][0]["ranks"][1].pop(0)


def an_unknown_kind(content):
    content["steps"][0]["ranks"][0][0][0] = "Q"


def an_end_before_the_start(content):
    content["steps"][0]["ranks"][0][0][4] = 0.0


def a_foreign_micro_batch(content):
    content["steps"][0]["ranks"][0][0][2] = 8


def an_overlap(content):
    content["steps"][0]["ranks"][0][1][3] -= 0.5


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (no_schema, "its schema is not 1"),
        (no_steps, "it has no steps"),
        (a_rank_less, "step 3 does not have 2 ranks"),
        (a_forward_less, "rank 1 lacks a forward or a backward"),
        (an_unknown_kind, "not \\[kind, chunk, microbatch, start, end\\]"),
        (an_end_before_the_start, "F\\(0,0\\) has no times"),
        (a_foreign_micro_batch, "outside the layout"),
        (an_overlap, "rank 0 has operations that overlap"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, damage, told) -> None:
    content = json.loads(json.dumps(record().to_json()))
    damage(content)
    (tmp_path / "timeline.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=told) as error:
        read(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path / "timeline.json") in str(error.value)


@pytest.mark.parametrize("text", [None, "", "[1", "[]", "null"])
def test_a_file_that_is_none_is_refused(tmp_path, text) -> None:
    if text is not None:
        (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(UserError, match=r"timeline\.json: (no such file|not a recorded timeline)"):
        read(tmp_path)

import io
import itertools
import json
from collections import Counter
from fractions import Fraction
from xml.etree import ElementTree

import pytest
from PIL import Image

from parallel.pipeline import draw
from parallel.pipeline.build import build
from parallel.pipeline.simulate import Timeline, simulate, uniform
from parallel.pipeline.table import Layout, Op, Table

SVG = "{http://www.w3.org/2000/svg}"


def timeline(schedule="1f1b", pipeline=4, virtual=1, microbatches=16, **costs) -> Timeline:
    table = build(schedule, pipeline, virtual, microbatches)
    return simulate(table, uniform(table.layout, **costs))


def operations(drawn: Timeline) -> int:
    return sum(map(len, drawn.table.ranks))


def boxes(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "tl-op"]


def subpaths(root: ElementTree.Element) -> int:
    return sum(path.get("d", "").count("M") for path in root.iter(f"{SVG}path"))


def number(rect: ElementTree.Element, name: str) -> float:
    return float(rect.get(name, "nan"))


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb1p", 1), ("zbv", 2)]
)
def test_every_operation_is_a_box_with_its_micro_batch(schedule, virtual) -> None:
    drawn = timeline(schedule, 4, virtual, 16)
    root = ElementTree.fromstring(draw.svg(drawn))
    found = boxes(root)
    assert len(found) == operations(drawn)
    labels = Counter(text.text for group in root.iter(f"{SVG}g") for text in group.findall(f"{SVG}text"))
    kinds = 3 if drawn.table.splits_backward else 2
    legend = 2 * virtual if virtual > 1 else 0
    assert labels["15"] == 4 * virtual * kinds
    assert labels.total() >= operations(drawn) + legend


def test_boxes_of_a_rank_stand_at_their_times_and_do_not_overlap() -> None:
    drawn = timeline(microbatches=4)
    root = ElementTree.fromstring(draw.svg(drawn))
    rows = {}
    for rect in boxes(root):
        rows.setdefault(number(rect, "y"), []).append((number(rect, "x"), number(rect, "width")))
    assert len(rows) == 4
    scale = (number(root, "width") - draw.LEFT - draw.RIGHT) / 21  # (4 + 3) micro-batches of 3
    for rank, row in enumerate(rows[y] for y in sorted(rows)):
        row.sort()
        assert row[0][0] == pytest.approx(draw.LEFT + rank * scale, abs=0.1)
        assert all(x + width <= later + 0.01 for (x, width), (later, _) in itertools.pairwise(row))


def test_a_large_picture_is_paths_without_texts_and_stays_small(monkeypatch) -> None:
    drawn = timeline("interleaved", 16, 8, 128)
    text = draw.svg(drawn)
    assert len(text) < 1_000_000
    root = ElementTree.fromstring(text)
    assert not boxes(root)
    swatches = 2 * 8
    assert subpaths(root) == operations(drawn) + swatches
    monkeypatch.setattr(draw, "MOST_BOXES", 10_000)
    assert 2_000 < subpaths(ElementTree.fromstring(draw.svg(drawn))) <= 10_000 + swatches


def test_thin_boxes_are_gathered_in_the_prevailing_colour_but_not_across_gaps() -> None:
    layout = Layout(1, 1, 1001)
    ops = (*tuple(Op("F", 0, number) for number in range(1000)), Op("B", 0, 1000))
    starts = [*(number / 10 for number in range(1000)), 10_000.0]
    ends = [*(number / 10 + 0.1 for number in range(1000)), 20_000.0]
    drawn = Timeline(Table(layout, (ops,)), (tuple(starts),), (tuple(ends),))
    found = draw._drawing(drawn, "units", "").boxes
    merged = [box for box in found if box.ops]
    assert sum(box.ops for box in merged) == 1001
    assert len(merged) < 60, "100 units of 20,000 are 16 pixels of 3200"
    assert merged[-1].ops == 1 and merged[-1].x == pytest.approx(draw.LEFT + draw.WIDEST / 2)
    assert merged[-2].x + merged[-2].width < draw.LEFT + 17


def test_the_page_inside_another_needs_nothing_from_outside() -> None:
    text = draw.svg(timeline(), inline=True)
    assert "http" not in text and "url(" not in text
    page = draw.html({"planned": timeline(), "measured <1>": timeline(microbatches=8)}, [("steps", "a & b")])
    assert "http" not in page and "url(" not in page and "<script" not in page
    assert page.count("<svg") == 2 and "measured &lt;1&gt;" in page and "a &amp; b" in page
    # 3 of 4 ranks' micro-batches are idle: 9 of 57 units with 16 micro-batches, 9 of 33 with 8.
    assert page.count("<td>9 units</td>") == 8
    assert page.count(f"<td>{9 / 57:.1%}</td>") == 4 and page.count(f"<td>{9 / 33:.1%}</td>") == 4


def test_dark_pages_change_text_and_ground_but_not_boxes() -> None:
    text = draw.svg(timeline())
    dark = text.partition("prefers-color-scheme: dark")[2].partition("</style>")[0]
    assert draw.DARK["ink"] in dark and draw.DARK["paper"] in dark
    for first, last in draw.SHADES.values():
        for colour in (first, last):
            # Neither near the white page nor near the dark one.
            assert 75 < sum(draw._channels(colour)) / 3 < 225


@pytest.mark.parametrize(("microbatches", "scale"), [(16, 2), (120, 1)])
def test_png_has_the_size_of_the_picture_and_its_colours(microbatches, scale) -> None:
    drawn = timeline(microbatches=microbatches)
    root = ElementTree.fromstring(draw.svg(drawn))
    image = Image.open(io.BytesIO(draw.png(drawn)))
    assert image.format == "PNG"
    assert image.size == tuple(round(number(root, side) * scale) for side in ("width", "height"))
    counts = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 20)}
    forward, backward, empty = (
        counts[draw._channels(colour)]
        for colour in (draw.SHADES["F"][0], draw.SHADES["B"][0], draw.LIGHT["empty"])
    )
    assert backward / forward == pytest.approx(2, rel=0.2)
    # Beside the bubble there is a line of one pixel behind every box.
    bubble, axis = 3 / (microbatches + 3), number(root, "width") - draw.LEFT - draw.RIGHT
    lines = 2 * microbatches / (axis * scale)
    assert empty / (forward + backward + empty) == pytest.approx(bubble + lines, abs=0.01)


def test_chrome_trace_has_a_thread_a_rank_without_overlap() -> None:
    drawn = timeline("zbv", 4, 2, 12, forward=Fraction(1, 3))
    trace = json.loads(json.dumps(draw.chrome_trace(drawn)))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == operations(drawn)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == [f"rank {rank}" for rank in range(4)]
    for rank, ops in enumerate(drawn.table.ranks):
        events = [event for event in complete if event["tid"] == rank]
        assert [(e["args"]["kind"], e["args"]["chunk"], e["args"]["microbatch"]) for e in events] == list(ops)
        assert events[0]["args"]["stage"] == rank
        assert all(a["ts"] + a["dur"] <= b["ts"] + 2e-3 for a, b in itertools.pairwise(events))
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(1000 * drawn.makespan)


def test_seconds_are_shown_in_a_fitting_unit_and_traced_in_microseconds() -> None:
    drawn = timeline(pipeline=1, microbatches=2, forward=0.001, backward=0.002)
    assert "6 ms, bubble 0.0%" in draw.svg(drawn, unit="s")
    [*_, last] = draw.chrome_trace(drawn, unit="s")["traceEvents"]
    assert (last["ts"], last["dur"]) == pytest.approx((4000, 2000))
    assert [draw.duration(value, "s") for value in (2.5, 0.0025, 2.5e-6)] == ["2.5 s", "2.5 ms", "2.5 µs"]


def test_vision_and_gradient_sums_have_colours_and_names_of_their_own() -> None:
    ops = (Op("VF", 0, 0), Op("VF", 1, 0), Op("F", 0, 0), Op("B", 0, 0), Op("VB", 0, 0), Op("R", -1, 0))
    times = tuple(float(at) for at in range(7))
    drawn = Timeline(Table(Layout(1, 1, 1), (ops,), parts=(2,)), (times[:-1],), (times[1:],))
    root = ElementTree.fromstring(draw.svg(drawn))
    assert (
        len({group.get("fill") for group in root.iter(f"{SVG}g") if group.find(f"{SVG}rect") is not None})
        == 6
    )
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"forward", "backward", "vision forward, part 0 to 1", "vision backward", "gradient sum"} <= texts
    trace = draw.chrome_trace(drawn)["traceEvents"]
    assert "stage" not in trace[-1]["args"] and trace[-1]["args"]["chunk"] == -1

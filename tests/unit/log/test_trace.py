import json

import pytest

from k3train.log.trace import Trace, write


def run_steps(trace, first, last):
    for step in range(first, last + 1):
        with trace.phase("forward_backward", step), trace.phase("data", step):
            pass
        with trace.phase("optimizer", step):
            pass


def test_phases_are_summed_and_reset():
    trace = Trace()
    run_steps(trace, 1, 3)
    seconds = trace.phase_seconds()
    assert set(seconds) == {"time/forward_backward", "time/data", "time/optimizer"}
    assert 0 < seconds["time/data"] < seconds["time/forward_backward"]
    assert trace.phase_seconds() == {}


def test_only_the_first_and_the_last_steps_are_traced_and_synchronized():
    calls = []
    trace = Trace(first_step=11, last_step=20, trace_steps=2, synchronize=lambda: calls.append(1))
    run_steps(trace, 11, 20)
    spans = [event for event in trace.events() if event["ph"] == "X"]
    assert sorted({event["args"]["step"] for event in spans}) == [11, 12, 19, 20]
    assert len(spans) == 4 * 3
    assert len(calls) == 2 * len(spans)


def test_no_trace_steps_keep_no_events():
    trace = Trace(first_step=1, last_step=5, trace_steps=0)
    run_steps(trace, 1, 5)
    assert [event["ph"] for event in trace.events()] == ["M", "M"]


def test_the_file_merges_ranks_in_the_trace_event_format(tmp_path):
    ranks = [Trace(rank, last_step=2, trace_steps=2) for rank in (0, 1)]
    for trace in ranks:
        run_steps(trace, 1, 2)
    write(tmp_path / "trace.json", [trace.events() for trace in ranks])
    content = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    names = [event for event in content["traceEvents"] if event["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in names] == [(0, "rank 0"), (1, "rank 1")]
    assert {event["pid"] for event in spans} == {0, 1}
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 and {"name", "cat", "tid", "args"} <= event.keys() for event in spans)
    outer = next(event for event in spans if event["name"] == "forward_backward")
    inner = next(event for event in spans if event["name"] == "data")
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01


def test_a_phase_that_raises_is_counted_without_waiting_for_the_device():
    calls = []
    trace = Trace(last_step=1, trace_steps=1, synchronize=lambda: calls.append(1))
    with pytest.raises(RuntimeError), trace.phase("data", 1):
        raise RuntimeError
    assert "time/data" in trace.phase_seconds()
    assert len(calls) == 1


def test_an_empty_trace_is_still_a_trace(tmp_path):
    write(tmp_path / "trace.json", [])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []

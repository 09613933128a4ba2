import errno
import json
import subprocess
import sys

import pytest

from k3train.config import Config
from k3train.log import events, metrics
from k3train.log.tracker import Tracker


class FailingSink:
    def __init__(self, at_step):
        self.at_step = at_step
        self.steps = []

    def log(self, step, values):
        if step == self.at_step:
            raise ConnectionError("the server\nwent away")
        self.steps.append(step)

    def close(self):
        self.steps.append("closed")


@pytest.fixture
def config():
    config = Config()
    config.log.tensorboard = False
    return config


def with_sinks(monkeypatch, **builders):
    monkeypatch.setattr("k3train.log.tracker.sink_builders", lambda *arguments: builders)


def test_a_failing_sink_is_dropped_with_one_warning_and_the_others_go_on(tmp_path, config, monkeypatch):
    bad, good = FailingSink(2), FailingSink(None)
    with_sinks(monkeypatch, bad=lambda: bad, good=lambda: good)
    warnings = []
    tracker = Tracker(config, tmp_path, warn=warnings.append)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    assert warnings == ["bad is off for the rest of this run: the server went away"]
    assert bad.steps == [1]
    assert good.steps == [1, 2, 3, "closed"]
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3]


def test_a_sink_that_cannot_start_is_dropped(tmp_path, config, monkeypatch):
    def build():
        raise PermissionError("read-only")

    with_sinks(monkeypatch, broken=build)
    warnings = []
    tracker = Tracker(config, tmp_path, warn=warnings.append)
    tracker.log(1, {"loss": 1.0})
    assert warnings == ["broken is off for the rest of this run: read-only"]
    assert metrics.read(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_a_full_disk_is_reported_once_a_minute(tmp_path, config, monkeypatch):
    now, warnings = [0.0], []
    tracker = Tracker(config, tmp_path, warn=warnings.append, clock=lambda: now[0])

    def full(descriptor, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        for second in range(0, 125, 5):
            now[0] = float(second)
            tracker.log(second, {"loss": 1.0})
    assert len(warnings) == 3
    assert "metrics.jsonl" in warnings[0]
    assert "No space left on device" in warnings[0]
    tracker.close()
    assert [record["step"] for record in metrics.read(tmp_path)] == list(range(0, 125, 5))


def test_a_value_that_json_cannot_hold_does_not_stop_the_run(tmp_path, config):
    warnings = []
    tracker = Tracker(config, tmp_path, warn=warnings.append)
    tracker.log(1, {"loss": object()})
    tracker.log(2, {"loss": 1.0})
    assert len(warnings) == 1
    assert metrics.read(tmp_path) == [{"step": 2, "loss": 1.0}]


def test_other_ranks_write_nothing(tmp_path, config):
    config.log.tensorboard = True
    tracker = Tracker(config, tmp_path / "run", writer=False)
    tracker.log(1, {"loss": 1.0})
    tracker.event(1, "skipped", "loss not finite")
    tracker.close()
    assert not (tmp_path / "run").exists()


def test_the_configured_sinks_get_the_metrics(tmp_path, config):
    config.log.tensorboard = True
    tracker = Tracker(config, tmp_path, resume_step=0)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    tracker.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert not (tmp_path / "wandb_id").exists()


def test_events_outlive_a_resume(tmp_path, config):
    Tracker(config, tmp_path).event(9, "skipped", "loss not finite")
    Tracker(config, tmp_path, resume_step=4).event(4, "resumed", "from step 4")
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"torn')
    found = events.read(tmp_path)
    assert [(event["step"], event["kind"]) for event in found] == [(9, "skipped"), (4, "resumed")]
    assert json.dumps(found)


def test_reporting_needs_no_torch():
    code = (
        "import sys, k3train.log.tracker, k3train.log.tensorboard, k3train.log.wandb, k3train.log.progress, "
        "k3train.log.trace, k3train.log.report; "
        "print([name for name in ('torch', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"

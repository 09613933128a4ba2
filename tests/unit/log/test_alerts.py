import dataclasses
import math
import os
import types

import pytest

from k3train.alert_config import AlertConfig
from k3train.config import Config
from k3train.log import alerts as alerts_module
from k3train.log import events
from k3train.log.alerts import Alerts, Episode
from k3train.log.tracker import Tracker

OFF = {"loss_spike": 0, "imbalance": 0, "stall": 0, "nonfinite": 0, "disk_gib": 0, "checkpoint_minutes": 0}


def make(tmp_path, *, checkpoints=True, clock=lambda: 0.0, **limits):
    config = AlertConfig(**(OFF | {"lines": 2} | limits))
    return Alerts(config, tmp_path, checkpoints=checkpoints, clock=clock)


def told(alerts, lines):
    """(number of the line, rule, over) of each alert."""
    return [
        (number, alert.rule, alert.over)
        for number, line in enumerate(lines)
        for alert in alerts.observe(line)
    ]


def test_an_episode_begins_and_ends_once():
    episode = Episode(begin=2, end=2, clear=0.8)
    shares = [1.2, 0.9, 1.0, 1.5, 2.0, 0.9, 0.7, 0.85, 0.7, 0.6, 0.6, 1.0, 1.0]
    assert [number for number, share in enumerate(shares) if episode.take(share)] == [3, 9, 12]
    assert episode.active


def test_a_spike_of_the_loss_is_told_once_and_does_not_become_usual(tmp_path):
    alerts = make(tmp_path, loss_spike=10.0)
    quiet = [{"loss": 2.0 + 0.01 * (number % 3)} for number in range(30)]
    spike = [{"loss": 4.0}] * 100
    assert told(alerts, [*quiet, *spike, *quiet]) == [(31, "loss_spike", False), (131, "loss_spike", True)]
    assert alerts.losses.median == pytest.approx(2.01)


def test_a_single_high_loss_or_a_slow_rise_is_no_spike(tmp_path):
    alerts = make(tmp_path, loss_spike=10.0)
    losses = [2.0] * 30 + [9.0] + [2.0] * 5 + [2.0 + 0.002 * number for number in range(200)]
    assert told(alerts, [{"loss": loss} for loss in losses]) == []


def test_nothing_is_judged_before_there_is_something_to_compare_with(tmp_path):
    alerts = make(tmp_path, loss_spike=10.0, stall=4.0)
    lines = [{"loss": 2.0, "time/step": 1.0}] * 10 + [{"loss": 50.0, "time/step": 500.0}] * 3
    assert told(alerts, lines) == []


def test_a_stall_is_some_times_the_median_and_some_seconds(tmp_path):
    alerts = make(tmp_path, stall=4.0)
    usual = [{"time/step": 1.0}] * 20
    # 4 times the median alone would be 4 s; 11 s are 10 s longer.
    assert told(alerts, [*usual, {"time/step": 10.9}, {"time/step": 11.1}]) == [(21, "stall", False)]
    slow = make(tmp_path, stall=4.0)
    usual = [{"time/step": 60.0}] * 20
    assert told(slow, [*usual, {"time/step": 239.0}, {"time/step": 241.0}]) == [(21, "stall", False)]


def test_imbalance_and_skipped_steps(tmp_path):
    alerts = make(tmp_path, imbalance=2.0, nonfinite=1.0)
    lines = [{"moe_rows_max_over_mean": ratio} for ratio in (2.5, 1.9, 2.5, 2.5, 2.5)]
    assert told(alerts, lines) == [(3, "imbalance", False)]
    # 5 were skipped before this start, none of them now; then one more.
    lines = [{"loss": 2.0, "skipped_steps": count} for count in (5, 5, 6, 7, 7, 7)]
    alerts = make(tmp_path, nonfinite=1.0)
    assert told(alerts, lines) == [(2, "nonfinite", False), (5, "nonfinite", True)]
    (alert,) = make(tmp_path, nonfinite=1.0).observe({"loss": math.nan})
    assert alert.text == "loss nan"


def test_a_full_disk_is_looked_at_every_half_minute(tmp_path, monkeypatch):
    now, looks, free = [0.0], [], [5 * 2**30]

    def usage(folder):
        looks.append(folder)
        return types.SimpleNamespace(free=free[0])

    monkeypatch.setattr(alerts_module.shutil, "disk_usage", usage)
    alerts = make(tmp_path, clock=lambda: now[0], disk_gib=4.0)
    found = []
    for second in range(120):
        now[0] = float(second)
        free[0] = 2**30 if second >= 60 else 5 * 2**30
        found += [(second, alert.text) for alert in alerts.observe({})]
    assert found == [(60, f"1.00 GiB free for {tmp_path} (limit 4 GiB)")]
    assert len(looks) == 4
    assert alerts.active == {"disk": True}


def test_a_checkpoint_is_old_by_its_folder_or_by_the_start(tmp_path):
    now = [1_000_000.0]
    alerts = make(tmp_path, clock=lambda: now[0], checkpoint_minutes=10)
    now[0] += 540
    assert alerts.observe({}) == []
    now[0] += 120
    assert [alert.text for alert in alerts.observe({})] == [
        "the newest checkpoint is 11 minutes old (limit 10)"
    ]
    folder = tmp_path / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    os.utime(folder, (now[0], now[0]))
    now[0] += 60
    assert [alerts.observe({}), [alert.over for alert in alerts.observe({})]] == [[], [True]]
    assert alerts.status()["checkpoint_age_seconds"] == 60
    assert make(tmp_path, checkpoints=False, checkpoint_minutes=1).active == {}


def test_a_folder_that_goes_away_leaves_the_last_look(tmp_path, monkeypatch):
    now = [0.0]
    alerts = make(tmp_path, clock=lambda: now[0], disk_gib=4.0)
    before = alerts.status()

    def gone(folder):
        raise OSError("stale handle")

    monkeypatch.setattr(alerts_module.shutil, "disk_usage", gone)
    now[0] = 1000.0
    assert alerts.status() == before | {"checkpoint_age_seconds": 1000.0}


def test_the_tracker_writes_an_alert_down_and_passes_it_on(tmp_path, monkeypatch):
    heard = []

    class Ear:
        def log(self, step, metrics): ...

        def close(self): ...

        def alert(self, step, alert):
            heard.append((step, alert.rule))

    config = Config()
    config.log.tensorboard = False
    monkeypatch.setattr("k3train.log.tracker.sink_builders", lambda *arguments: {"ear": Ear})
    warnings = []
    tracker = Tracker(config, tmp_path, warn=warnings.append)
    for step in range(1, 5):
        tracker.log(step, {"loss": math.inf if step == 2 else 1.0})
    tracker.close()
    assert [(event["step"], event["kind"], event["text"]) for event in events.read(tmp_path)] == [
        (2, "alert", "nonfinite: loss inf")
    ]
    assert warnings == ["alert at step 2: nonfinite: loss inf"]
    assert heard == [(2, "nonfinite")]


def test_every_rule_has_a_key_and_can_be_turned_off(tmp_path):
    every = Alerts(AlertConfig(), tmp_path, checkpoints=True)
    assert len(every.active) == len(OFF)
    assert set(OFF) <= {entry.name for entry in dataclasses.fields(AlertConfig)}
    assert make(tmp_path).active == {}

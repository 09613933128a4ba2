"""What counts as a loss spike, and what a rollback leaves behind."""

from __future__ import annotations

import json
import math

from k3train.fault_config import SpikeConfig
from k3train.train.spike import SpikeWatch

CONFIG = SpikeConfig(threshold=10.0, floor=0.1, window=16, steps=2, rollbacks=2)


def seen(losses: list[float], config: SpikeConfig = CONFIG) -> SpikeWatch:
    watch = SpikeWatch(config)
    for step, loss in enumerate(losses, start=1):
        assert watch.observe(step, loss) is None
    return watch


def test_two_suspect_steps_in_a_row_are_a_spike() -> None:
    watch = seen([2.0, 2.01, 1.99, 2.0, 2.02, 2.0])
    assert watch.observe(7, 2.5) is None
    assert watch.suspects == 1
    spike = watch.observe(8, 2.6)
    assert spike is not None
    assert (spike.first, spike.last, spike.median) == (7, 8, 2.0)
    assert math.isclose(spike.limit, 2.1)


def test_one_suspect_step_is_none_and_does_not_enter_the_window() -> None:
    watch = seen([2.0] * 6)
    assert watch.observe(7, 9.0) is None
    assert watch.observe(8, 2.0) is None
    assert watch.suspects == 0 and 9.0 not in watch.losses


def test_nothing_is_suspect_early_nor_when_off_nor_what_is_not_finite() -> None:
    assert seen([2.0, 2.0, 2.0]).limit == math.inf
    off = seen([2.0] * 8 + [9.0] * 4, SpikeConfig())
    assert off.state() == {} and off.losses == []
    watch = seen([2.0] * 6)
    assert watch.observe(7, math.nan) is None and watch.suspects == 0


def test_a_rollback_keeps_the_count_and_adds_the_steps_left_out() -> None:
    watch = seen([2.0] * 6)
    saved = json.loads(json.dumps(watch.state()))
    watch.observe(7, 9.0)
    spike = watch.observe(8, 9.0)
    assert spike is not None
    watch.go_back(spike, saved)
    assert (watch.skips, watch.rollbacks, watch.suspects) == ({7: 2}, 1, 0)
    watch.observe(7, 9.0)
    again = watch.observe(8, 9.0)
    assert again is not None
    watch.go_back(again, saved)
    assert (watch.skips, watch.rollbacks) == ({7: 4}, 2)
    other = SpikeWatch(CONFIG)
    other.restore(json.loads(json.dumps(watch.state())))
    assert other == watch

import math
import random

import pytest

from k3train.log.curves import Axis, collect, downsample, linear_ticks, log_ticks, short, smooth, value_axis


def test_downsampling_keeps_ends_and_extremes():
    generator = random.Random(3)
    points = [(step, generator.gauss(0, 1)) for step in range(100_000)]
    points[12_345] = (12_345, 50.0)
    points[77_777] = (77_777, -60.0)
    kept = downsample(points)
    assert len(kept) <= 2000
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert points[12_345] in kept
    assert points[77_777] in kept
    assert set(kept) <= set(points)


@pytest.mark.parametrize("count", [0, 1, 1999, 2000, 2001, 2003])
def test_short_series_are_kept_or_barely_reduced(count):
    points = [(step, float(step % 7)) for step in range(count)]
    kept = downsample(points)
    assert kept == points if count <= 2000 else len(kept) <= 2000


def test_smoothing_keeps_a_straight_line_and_its_ends():
    points = [(step, 3.0 - 0.01 * step) for step in range(500)]
    assert smooth(points) == [(step, pytest.approx(value)) for step, value in points]


def test_smoothing_reduces_noise():
    generator = random.Random(5)
    points = [(step, generator.gauss(0, 1)) for step in range(2000)]
    middle = [value for _, value in smooth(points)[100:-100]]
    assert math.sqrt(sum(value * value for value in middle) / len(middle)) < 0.25


def test_values_that_are_not_finite_are_counted():
    series = collect([{"step": 1, "loss": math.nan, "ok": True}, {"step": 2, "loss": 2, "name": "x"}])
    assert list(series) == ["loss"]
    assert (series["loss"].points, series["loss"].nonfinite) == ([(2, 2.0)], 1)


def test_ticks_are_round():
    assert linear_ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(-0.13, 0.21, 4) == pytest.approx([-0.1, 0.0, 0.1, 0.2])
    assert log_ticks(0.02, 300, 5) == pytest.approx([0.1, 1, 10, 100])
    assert log_ticks(0.8, 6, 5) == pytest.approx([1, 2, 5])


def test_axes_place_values_between_zero_and_one():
    assert Axis(1, 100, log=True).place(10) == pytest.approx(0.5)
    assert value_axis([2.0, 2.0], log=False).place(2.0) == pytest.approx(0.5)
    assert value_axis([0.0, 0.0], log=False).place(0.0) == 0.0
    assert value_axis([1e-9, 1e-9], log=True).place(1e-9) == pytest.approx(0.5)
    assert value_axis([0.01, 5.0], log=False).low == 0.0


def test_labels_are_short():
    values = (0.0, 0.00012, 0.002, 1.5, 1234.0, 12345.0, 2.5e6, 1e-12, -3.0e9)
    labels = ["0", "1.2e-4", "0.002", "1.5", "1234", "12.35k", "2.5M", "1e-12", "-3G"]
    assert [short(value) for value in values] == labels

import json
import math
import os
import random
import struct

import pytest

from k3train.log import metrics
from k3train.log.metrics import MetricsLog


def written(folder, steps, resume_step=0):
    log = MetricsLog(folder, resume_step=resume_step)
    for step in steps:
        log.write(step, {"loss": 1 / (step + 2), "lr": 1e-3 * step})
    log.close()
    return (folder / "metrics.jsonl").read_bytes()


def test_every_bit_of_a_float_survives(tmp_path):
    generator = random.Random(7)
    values = [5e-324, 1.7976931348623157e308, 0.1 + 0.2, -0.0]
    while len(values) < 500:
        value = struct.unpack("<d", generator.randbytes(8))[0]
        if math.isfinite(value):
            values.append(value)
    log = MetricsLog(tmp_path, resume_step=0)
    for step, value in enumerate(values):
        log.write(step, {"loss": value})
    back = [record["loss"] for record in metrics.read(tmp_path)]
    assert [struct.pack("<d", value) for value in back] == [struct.pack("<d", value) for value in values]


def test_values_that_are_not_finite_are_valid_json_and_read_back(tmp_path):
    log = MetricsLog(tmp_path, resume_step=0)
    log.write(1, {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "note": "text"})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": "NaN", "grad_norm": "Infinity", "low": "-Infinity", "note": "text"}
    (record,) = metrics.read(tmp_path)
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["low"], record["note"]) == (math.inf, -math.inf, "text")


def test_scalars_of_array_libraries_are_written_as_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    log = MetricsLog(tmp_path, resume_step=0)
    log.write(3, {"loss": numpy.float32(0.1), "count": numpy.int64(4)})
    assert metrics.read(tmp_path) == [{"step": 3, "loss": float(numpy.float32(0.1)), "count": 4}]


def test_each_line_can_be_read_before_the_file_is_closed(tmp_path):
    log = MetricsLog(tmp_path, resume_step=0)
    log.write(1, {"loss": 2.0})
    assert metrics.read(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_a_resumed_file_equals_the_unkilled_one(tmp_path):
    whole = written(tmp_path / "whole", range(1, 11))
    written(tmp_path / "killed", range(1, 8))
    assert written(tmp_path / "killed", range(5, 11), resume_step=4) == whole


@pytest.mark.parametrize("tail", [b'{"step": 4, "lo', b'{"step": 4, "loss": 0.5}', b"\x00\x00\xff"])
def test_a_torn_last_line_is_dropped(tmp_path, tail):
    whole = written(tmp_path / "whole", range(1, 6))
    first = written(tmp_path / "killed", range(1, 4))
    (tmp_path / "killed" / "metrics.jsonl").write_bytes(first + tail)
    assert [record["step"] for record in metrics.read(tmp_path / "killed")] == [1, 2, 3]
    assert written(tmp_path / "killed", range(4, 6), resume_step=3) == whole


def test_opening_without_anything_to_drop_leaves_the_file_alone(tmp_path):
    written(tmp_path, range(1, 4))
    before = os.stat(tmp_path / "metrics.jsonl")
    MetricsLog(tmp_path, resume_step=3)
    after = os.stat(tmp_path / "metrics.jsonl")
    assert (before.st_ino, before.st_mtime_ns, before.st_size) == (
        after.st_ino,
        after.st_mtime_ns,
        after.st_size,
    )


def test_lines_that_did_not_fit_on_the_disk_follow_when_there_is_room(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, resume_step=0)
    log.write(1, {"loss": 1.0})
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: real_write(descriptor, line[:5]))
    for step in (2, 3):
        with pytest.raises(OSError, match="only 5 of"):
            log.write(step, {"loss": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'
    monkeypatch.undo()
    log.write(4, {"loss": 1.0})
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3, 4]


def test_no_file_reads_as_no_records(tmp_path):
    assert metrics.read(tmp_path) == []

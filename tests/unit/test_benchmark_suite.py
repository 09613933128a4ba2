"""The runner of all benchmarks: what fails or hangs is told and costs the others nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks import suite
from benchmarks.common import report

SCRIPTS = {
    "good": (
        "import json, sys; reached = {'speed': True, 'memory': False}\n"
        "json.dump({'reached': reached}, open(sys.argv[1], 'w'))"
    ),
    "bad": "print('first'); print('broken: no memory'); raise SystemExit(3)",
    "stuck": (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); child = os.fork()\n"
        "while True: open(f'{os.environ[\"LIVES\"]}', 'a').write('.'); time.sleep(0.05)"
    ),
}


@pytest.fixture
def made_up(monkeypatch, tmp_path: Path) -> Path:
    """Parts that are scripts in place of benchmarks; where the one that hangs writes."""
    monkeypatch.setattr(suite, "BENCHMARKS", tuple(suite.Part(name) for name in SCRIPTS))
    monkeypatch.setattr(suite, "count_gpus", lambda: 0)
    monkeypatch.setattr(suite, "QUICK_LIMIT", 2)
    monkeypatch.setattr(suite, "GRACE", 0.2)
    monkeypatch.setenv("LIVES", str(tmp_path / "lives"))

    def command(part, figures, *, quick):
        return [sys.executable, "-c", SCRIPTS[part.name], str(figures)]

    monkeypatch.setattr(suite, "command", command)
    return tmp_path / "lives"


def ran(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["suite.py", *arguments])
    return suite.main()


def test_each_part_ends_with_its_outcome(made_up: Path, monkeypatch, tmp_path, capsys) -> None:
    assert ran(monkeypatch, "--out", str(tmp_path / "out")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "passed" in lines[1] and "1 of 2 goals, missed memory" in lines[1]
    assert "failed" in lines[2] and "broken: no memory" in lines[2]
    assert "over 2 s" in lines[3] and "no output" in lines[3]
    size = made_up.stat().st_size
    time.sleep(0.3)
    assert size == made_up.stat().st_size, "a process of the part that hung still runs"


def test_resume_leaves_out_what_passed_at_the_commit(made_up, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(report, "commit", lambda: "abc")
    out = ["--out", str(tmp_path / "out"), "--only", "good", "bad"]
    assert ran(monkeypatch, *out) == 1
    capsys.readouterr()
    assert ran(monkeypatch, *out, "--resume") == 1
    assert "good" not in (again := capsys.readouterr()).err and "bad" in again.err
    for other in ("abd", "unknown", "abc-dirty"):
        monkeypatch.setattr(report, "commit", lambda other=other: other)
        ran(monkeypatch, *out, "--resume")
        assert "good" in capsys.readouterr().err, other


def test_a_budget_starts_nothing_that_could_end_later(made_up, monkeypatch, tmp_path, capsys) -> None:
    assert ran(monkeypatch, "--out", str(tmp_path), "--only", "good", "--budget", "1") == 1
    assert "not run" in capsys.readouterr().out and not (tmp_path / "good.log").exists()


def test_a_wrong_name_is_refused(made_up, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        ran(monkeypatch, "--only", "goood")
    assert ended.value.code == 2 and "--only goood: no such part" in capsys.readouterr().err


def test_every_benchmark_is_a_part() -> None:
    """But for the runner itself."""
    scripts = {file.stem for file in Path(suite.__file__).parent.glob("*.py")} - {"suite"}
    assert {part.name for part in suite.BENCHMARKS} == scripts
    assert all((suite.ROOT / "benchmarks" / f"{part.name}.py").exists() for part in suite.parts(8)[-3:])


def test_gpu_machines_run_what_they_have_gpus_for() -> None:
    names = {gpus: {part.name for part in suite.parts(gpus)} for gpus in (0, 1, 2)}
    assert "kcp" in names[0] and "startup" in names[0]
    assert "kda" in names[1] and "test_kda_triton" in names[1] and not {"kcp", "startup"} & names[1]
    assert "kcp" in names[2]

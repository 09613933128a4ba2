"""What is ended when the process that holds a guard is gone, and in which order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import guard

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: open(sys.argv[1], "a").write(f"{number} "))
open(sys.argv[1], "a").write(f"{os.getpid()} ")
while "15" not in open(sys.argv[1]).read().split() or sys.argv[2] == "deaf":
    time.sleep(0.01)
"""
HOLDER = f"""
import subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from launch import guard
folder, note, grace, kind = sys.argv[1:]
guarded = guard.Guard("GUARDED", folder, float(grace))
subprocess.Popen([sys.executable, "-S", "-c", {CHILD!r}, note, kind], env={{"GUARDED": folder}})
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("kind", "grace", "heard"), [("hears", 60.0, True), ("deaf", 0.5, True), ("deaf", 0.0, False)]
)
def test_what_is_marked_is_asked_to_save_then_killed_even_if_it_is_stopped(
    kind: str, grace: float, heard: bool, tmp_path: Path
) -> None:
    folder, note = tmp_path / "folder", tmp_path / "note"
    folder.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(folder), str(note), str(grace), kind], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
    until(lambda: note.exists() and note.read_text().strip() != "")
    child = int(note.read_text().split()[0])
    assert guard.marked("GUARDED", str(folder)) == {child} == guard.heads({child})
    assert guard.marked("GUARDED", str(folder)[:-1]) == set()
    os.kill(child, signal.SIGSTOP)
    holder.kill()
    holder.communicate()
    until(lambda: not folder.exists())
    assert guard.marked("GUARDED", str(folder)) == set()
    assert note.read_text().split()[1:] == (["15"] if heard else [])


def test_those_that_others_have_started_are_no_heads() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'input()'])"
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    until(lambda: bool(children.read_text()))
    child = int(children.read_text())
    assert guard.heads({parent.pid, child}) == {parent.pid}
    assert guard.heads({child}) == {child}
    parent.communicate(b"\n")


def until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

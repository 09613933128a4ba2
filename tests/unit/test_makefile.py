"""How the Makefile finds a Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("place", "version"),
    [
        (".pyenv/versions/3.13.1/bin/python", "3.13"),
        (".local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3.12", "3.12"),
        (".local/share/uv/python/cpython-3.14.0-linux-x86_64-gnu/bin/python3.14", "3.14"),
    ],
)
def test_a_python_of_pyenv_or_uv_is_found(place: str, version: str, tmp_path: Path) -> None:
    python = tmp_path / place
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    old = python.with_name("python3.11")
    old.write_text("#!/bin/sh\nexit 0\n")
    old.chmod(0o755)
    assert found(tmp_path) == str(python)


def test_without_any_python_nothing_is_found(tmp_path: Path) -> None:
    assert found(tmp_path) == ""


def found(home: Path) -> str:
    """The Makefile's PYTHON where PATH holds none."""
    make = shutil.which("make")
    assert make is not None
    command = [make, "--no-print-directory", "-C", str(ROOT), "--eval", "show: ; @echo '$(PYTHON)'", "show"]
    environment = {"HOME": str(home), "PATH": str(home)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()

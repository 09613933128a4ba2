"""Runs the command line in processes of its own, with the training loop replaced by a fake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LAYOUT_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(module, *arguments, fake="...") -> process, in `tmp_path`; whatever is left of it is killed."""
    site, temporary = tmp_path / "site", tmp_path / "temporary"
    site.mkdir()
    temporary.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('FAKE_LOOP'):\n"
        f"    sys.path.insert(0, {str(HERE)!r})\n"
        "    import fake_loop\n"
        "    sys.modules['k3train.train.loop'] = fake_loop.module()\n"
    )
    processes: list[subprocess.Popen[str]] = []

    def launch(module: str, *arguments: str, fake: str = "") -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if key not in LAYOUT_VARIABLES}
        environment |= {
            "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
            "FAKE_LOOP": fake,
            "K3TRAIN_TEST": str(tmp_path),
            "TMPDIR": str(temporary),
        }
        command = [sys.executable, "-m", module, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, start_new_session=True, **pipes
        )
        processes.append(process)
        return process

    yield launch
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def run(start: Start) -> Callable[..., tuple[int, str, str]]:
    """run(module, *arguments, fake="...") -> exit status, standard output, standard error."""

    def finished(module: str, *arguments: str, fake: str = "") -> tuple[int, str, str]:
        process = start(module, *arguments, fake=fake)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return finished

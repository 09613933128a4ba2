"""`k3train checkpoint`: what is listed, found damaged, and removed or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint import folders, listing, manifest, places
from k3train.config import Config
from k3train.config_file import to_yaml
from k3train.errors import UserError
from launch.checkpoint import main

LAYOUT = {"pipeline": 2, "virtual": 2, "expert": 1, "context": 1, "data": 4}


def save(root: Path, step: int, **more: Any) -> Path:
    """A complete checkpoint of one file of 1,000 bytes."""
    folder = folders.complete(root, step)
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(bytes([step % 251]) * 1000)
    manifest.write(folder, {"step": step, "layout": LAYOUT, "extra": {"step": step}, **more}, {})
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 to 60; every 30th stays, and of the newest two."""
    for step in range(10, 70, 10):
        save(tmp_path / "checkpoints", step)
    config = Config()
    config.checkpoint.keep_every = 30
    config.checkpoint.local_dir = str(tmp_path / "disk")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    return tmp_path


def flip(folder: Path) -> None:
    """Change a byte and no size."""
    (folder / "part").write_bytes(b"\xff" * 1000)


def steps(run: Path) -> list[int]:
    """What is in the run's folder."""
    return folders.available(run / "checkpoints")


def test_list_shows_both_places(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / places.IDENTITY).write_text("abc")
    save(run / "disk" / "k3train-abc", 70, ranks=[4, 5, 6, 7])
    save(run / "disk" / "k3train-other", 80, ranks=[0])
    (folders.complete(run / "checkpoints", 20) / "part").write_bytes(b"torn")
    assert main(["list", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(entry["step"], entry["where"]) for entry in found] == [
        *((step, "run") for step in range(10, 70, 10)),
        (70, "local"),
    ]
    assert found[1]["problem"] == "part has 4 bytes and should have 1000" and found[0]["problem"] is None
    assert found[0]["bytes"] == 1000 and found[6]["ranks"] == [4, 5, 6, 7]
    assert main(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and "PP2 x VPP2 x DP4" in lines[1] and "local, 4 ranks of 4 to 7" in lines[7]


def test_list_needs_no_torch(run: Path) -> None:
    code = "import sys; from launch.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "checkpoint", "list", str(run)], check=True, timeout=60)


def test_verify_reads_contents(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folders.complete(run / "checkpoints", 40))
    assert main(["verify", str(run)]) == 1
    out, err = capsys.readouterr()
    assert "step 40 (run): the content of part does not match its checksum" in out
    assert out.count("intact") == 5 and err == ""
    assert main(["verify", str(run), "30", "50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert found == [{"step": step, "where": "run", "problems": []} for step in (30, 50)]
    with pytest.raises(UserError, match="has no checkpoint of step 55"):
        main(["verify", str(run), "55"])


def test_verify_names_a_torn_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folders.complete(run / "checkpoints", 10) / manifest.NAME).write_text("{")
    assert main(["verify", str(run), "10"]) == 1
    assert "manifest.json is missing or torn" in capsys.readouterr().out


def test_prune_asks_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000070.partial").mkdir()
    assert main(["prune", str(run)]) == 0
    out = capsys.readouterr().out
    assert "would remove steps 10, 20, 40: 0.00 MB; what stays: steps 30, 50, 60" in out and "--yes" in out
    assert "step-00000070.partial" in out and steps(run) == [10, 20, 30, 40, 50, 60]
    assert main(["prune", str(run), "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["remove"] == [10, 20, 40] and found["bytes"] == 3000 and found["newest_intact"] == 60
    assert steps(run) == [30, 50, 60]
    assert not (run / "checkpoints" / "step-00000070.partial").exists()


def test_prune_never_removes_the_newest_intact_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (50, 60):
        flip(folders.complete(run / "checkpoints", step))
    assert main(["prune", str(run), "--keep=1", "--keep-every=0", "--yes"]) == 0
    assert steps(run) == [40, 50, 60]
    assert "damaged, and left (--damaged): steps 50, 60" in capsys.readouterr().out
    assert main(["prune", str(run), "--keep=1", "--keep-every=0", "--damaged", "--yes"]) == 0
    assert steps(run) == [40]
    flip(folders.complete(run / "checkpoints", 40))
    assert main(["prune", str(run), "--keep=1", "--damaged", "--yes"]) == 0
    assert steps(run) == [40]
    assert "none of them is intact" in capsys.readouterr().out


def test_prune_waits_for_no_run(run: Path) -> None:
    lock = folders.lock_folder(run)
    with pytest.raises(UserError, match="in use by a run that goes on"):
        main(["prune", str(run), "--yes"])
    folders.unlock(lock)
    assert len(steps(run)) == 6


@pytest.mark.parametrize(
    ("keep", "keep_every", "gone"),
    [(0, 0, []), (2, 0, [10, 20, 30]), (1, 20, [10, 30]), (9, 0, []), (0, 20, [])],
)
def test_surplus(keep: int, keep_every: int, gone: list[int]) -> None:
    assert folders.surplus([50, 10, 20, 30, 40], keep, keep_every) == gone


def test_refusals(tmp_path: Path) -> None:
    for arguments, text in (
        ([], "no command given"),
        (["drop"], "drop is no command of it; valid are list, verify, prune"),
        (["list"], "the following arguments are required: RUN"),
        (["list", str(tmp_path / "absent")], "no such run folder"),
        (["list", str(tmp_path)], "no checkpoints folder"),
        (["prune", str(tmp_path), "--keep=-1"], "must be at least 0"),
    ):
        with pytest.raises(UserError, match=text):
            main(arguments)
    assert listing.retention(tmp_path) == (Config().checkpoint.keep, 0)

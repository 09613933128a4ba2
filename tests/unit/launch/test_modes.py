"""Who may read and change what is written: the umask decides, but never that everybody may write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3train.checkpoint import folders, local
from k3train.errors import UserError
from launch.cli import main
from launch.modes import keep_from_others
from offload.files.engine import ThreadEngine


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_job_file_follows_the_umask(umask: int, tmp_path: Path) -> None:
    assert main(["launch", "slurm", "--output", str(tmp_path / "job.sh"), "recipe=tiny"]) == 0
    assert mode(tmp_path / "job.sh") == 0o666 & ~umask & ~0o002


def test_folders_and_locks_stay_shared_with_the_group(umask: int, tmp_path: Path) -> None:
    keep_from_others()
    folders.check_writable(tmp_path / "run", 0)
    folders.unlock(folders.lock_folder(tmp_path / "run"))
    assert mode(tmp_path / "run") == 0o777 & ~umask & ~0o002
    assert mode(tmp_path / "run/.lock") == 0o666 & ~umask & ~0o002


@pytest.mark.parametrize("named", [False, True])
def test_offloaded_bytes_are_their_users_alone(umask: int, named: bool, tmp_path: Path) -> None:
    engine = ThreadEngine(direct=False)
    file = engine._open_named(tmp_path) if named else engine.open(tmp_path)
    assert stat.S_IMODE(os.fstat(file).st_mode) == 0o600
    engine.close(file)
    assert list(tmp_path.iterdir()) == []


def test_a_nodes_checkpoints_are_their_users_alone(umask: int, tmp_path: Path) -> None:
    root = tmp_path / "k3train-0123"
    local._make_private(root)
    assert mode(root) == 0o700
    root.chmod(0o777)
    local._make_private(root)
    assert mode(root) == 0o700


def test_a_folder_that_somebody_else_put_there_is_refused(tmp_path: Path) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.mkdir()
    link.symlink_to(own)
    (own / "mark").touch()
    local._refuse_strangers(own, own / "mark")
    with pytest.raises(UserError, match="belongs to another user; remove it"):
        local._refuse_strangers(link, own / "mark")
    if os.getuid() == 0:
        os.chown(own, 12345, -1)
        with pytest.raises(UserError, match="belongs to another user"):
            local._refuse_strangers(own, own / "mark")

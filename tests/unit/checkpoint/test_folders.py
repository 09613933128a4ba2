"""Folders of checkpoints: what counts as complete, what is removed, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k3train.checkpoint import folders
from k3train.errors import UserError


def test_only_complete_folders_count(tmp_path: Path) -> None:
    for name in (
        "step-00000020",
        "step-00000003",
        "step-123456789",
        "step-00000030.partial",
        "step-7",
        "notes",
    ):
        (tmp_path / name).mkdir()
    assert folders.available(tmp_path) == [3, 20, 123456789]
    assert folders.available(tmp_path / "absent") == []


def test_clean_removes_remains_and_names_them(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002.partial", "step-00000000.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("content")
    assert folders.clean(tmp_path) == ["step-00000000.removing", "step-00000002.partial"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3]), (1, [3]), (2, [2, 3]), (5, [1, 2, 3])])
def test_prune_keeps_the_newest(keep: int, left: list[int], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        folders.complete(tmp_path, step).mkdir()
    folders.prune(tmp_path, keep, newest=3)
    assert folders.available(tmp_path) == left
    assert len(list(tmp_path.iterdir())) == len(left)


def test_prune_lets_no_later_checkpoint_push_out_the_one_just_saved(tmp_path: Path) -> None:
    for step in (100, 150, 200):
        folders.complete(tmp_path, step).mkdir()
    folders.prune(tmp_path, 1, newest=150)
    assert folders.available(tmp_path) == [150, 200]


def test_removal_interrupted_half_way_leaves_no_complete_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.complete(tmp_path, 4)
    folder.mkdir()
    calls: list[Path] = []

    def fail_at_second(path: Path, **kwargs: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(folders.shutil, "rmtree", fail_at_second)
    with pytest.raises(KeyboardInterrupt):
        folders.remove(folder)
    assert folders.available(tmp_path) == []
    assert (tmp_path / "step-00000004.removing").is_dir()


def test_check_writable_makes_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    folders.check_writable(tmp_path / "a" / "b", 1)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_check_writable_refuses_a_full_disk_and_a_file_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a checkpoint needs 1000000000\.0 GB"):
        folders.check_writable(tmp_path, 10**18)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write in .*Not a directory; set run\.dir"):
        folders.check_writable(tmp_path / "file" / "runs", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_check_writable_refuses_a_folder_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        folders.check_writable(tmp_path, 1)


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    held = folders.lock_folder(tmp_path)
    with pytest.raises(UserError, match="in use by a run that goes on"):
        folders.lock_folder(tmp_path)
    assert held is not None
    os.close(held)
    again = folders.lock_folder(tmp_path)
    assert again is not None
    os.close(again)

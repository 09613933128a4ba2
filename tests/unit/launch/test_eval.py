"""`k3train eval`: one line for each wrong call."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "eval: nothing named; valid are needle, longmix"),
        (["x"], "eval: x is nothing to evaluate; valid are needle, longmix"),
        (["needle"], "eval needle: 0 names given; write k3train eval needle RUN"),
        (["longmix", "run"], "eval longmix: 1 names given; write k3train eval longmix RUN PREFIX"),
        (["needle", "run", "depth=3"], "eval needle: depth=3 is no option; valid are lengths, samples"),
        (["longmix", "run", "p", "lengths=3"], "eval longmix: lengths=3 is no option; valid are samples"),
        (["needle", "nowhere"], "nowhere: not a run folder (it has no config.yaml)"),
        (["needle", "run", "samples=x"], "samples=x: expected integers"),
        (["needle", "run", "samples=0"], "samples=0: need at least 1"),
        (["needle", "run", "lengths=1,256"], "lengths=1,256: need at least 2"),
    ],
)
def test_a_wrong_call_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.yaml").write_text("")
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"k3train: {message}") and error.count("\n") == 1


def test_tasks_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.yaml").write_text("")
    assert main(["eval", "longmix", "run", "nope"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("k3train: nope.tasks.jsonl does not exist; `k3train data longmix` writes it")
    assert error.count("\n") == 1


def test_a_run_whose_name_has_an_equals_sign_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    assert main(["eval", "needle", "lr=1"]) == 2
    assert "lr=1: not a run folder" in capsys.readouterr().err

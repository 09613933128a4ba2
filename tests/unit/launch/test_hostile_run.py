"""Every command that opens a run's folder, on one whose checkpoint would run code and whose texts are odd."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from k3train.checkpoint import manifest
from k3train.config_file import to_yaml
from launch.cli import main
from launch.compose import ready

REFUSED = "posix.system would run code"


class Payload:
    """A pickle of this makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder from somewhere, whose manifest fits."""
    folder = tmp_path / "run"
    step = folder / "checkpoints/step-00000004"
    step.mkdir(parents=True)
    config = ready(["recipe=tiny_dense_check", "data.tokenizer=byte", f"run.dir={folder}"], inputs=False)
    (folder / "config.yaml").write_text(to_yaml(config))
    (step / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    content = {"step": 4, "save": "x", "layout": {}, "updates": 4, "fixed": {}, "extra": {"stage": None}}
    manifest.write(step, content, {})
    return folder


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["sample", "RUN", "prompt=a"], 2),
        (["eval", "needle", "RUN", "samples=1", "lengths=64"], 2),
        (["convert", "export", "RUN", "RUN-out"], 2),
        (["checkpoint", "verify", "RUN"], 1),
        (["checkpoint", "list", "RUN"], 0),
        (["checkpoint", "prune", "RUN", "--keep=1", "--yes"], 0),
        (["report", "RUN"], None),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_nothing_runs(
    arguments: list[str], status: int | None, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from parallel.groups import destroy

    try:
        code = main([word.replace("RUN", str(run)) for word in arguments])
    finally:
        destroy()
    said = capsys.readouterr()
    assert not (run.parent / "ran").exists()
    assert status in (None, code)
    assert (REFUSED in said.out + said.err) == (status in (1, 2))


def test_the_payload_is_alive(run: Path) -> None:
    with (run / "checkpoints/step-00000004/.metadata").open("rb") as file:
        pickle.load(file)
    assert (run.parent / "ran").exists()


def test_a_configuration_file_makes_no_objects(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"run: !!python/object/apply:os.system ['touch {run.parent / 'ran'}']\n"
    (run / "config.yaml").write_text(text)
    assert main(["sample", str(run), "prompt=a"]) == 2
    error = capsys.readouterr().err
    assert "could not determine a constructor" in error and error.count("\n") == 1
    assert not (run.parent / "ran").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+run._target_=os.system", "no such key"),
        ("+model={_target_: os.system, _args_: [touch ran]}", "Key '_target_' not in 'ModelConfig'"),
        ("run.name=${oc.create:{_target_: os.system}}", "cannot be read"),
        ("run.name=${eval:1+1}", "Unsupported interpolation type eval"),
        ("hydra/launcher=basic", "hydra"),
    ],
)
def test_a_configuration_names_nothing_to_be_called(
    override: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "recipe=tiny_dense_check", override]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

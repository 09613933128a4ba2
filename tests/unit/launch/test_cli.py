from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from k3train.errors import UserError
from launch import cli, data, reference, sample
from launch.groups import groups
from launch.schema import keys

ROOT = Path(__file__).parents[3]

PROBE = (
    "import sys; from launch.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules,"
    " 'hydra' in sys.modules)"
)


def probe(folder: Path, *arguments: str) -> tuple[str, str]:
    """Last line of output (status, torch imported, hydra imported) and standard error of one command."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=folder, env={"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return done.stdout.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "recipe=none"], "recipe=none: no such recipe; valid are"),
        (["train", "optim.lr=x"], "optim.lr=x: expected a number"),
        (
            ["train", "parallel.context=3"],
            "parallel.context=3: must divide data.sequence_length=256; valid up to 64 are 1, 2, 4, 8, 16",
        ),
        (["train", "data=indexed"], "data.train=[]: name at least one prefix"),
        (["train", "recipe=k3_pretrain"], "data.train=[]: name at least one prefix: `k3train data prepare"),
        (
            ["train", "recipe=k3_pretrain", "data=bundled"],
            "cluster.nodes=128: `k3train train` starts one machine",
        ),
        (["train", "-m", "run.steps=0,1"], "run.steps=0: must be at least 1"),
        (["plan", "run.stepz=1"], "run.stepz=1: no such key; did you mean run.steps?"),
        (["trian"], "trian: no such verb; did you mean train?"),
        (["launch", "pbs"], "launch: pbs is no launcher; valid are slurm, kubernetes"),
        (["data"], "data: no command given; valid are prepare, longmix, show"),
        (["data", "make"], "data: make is no command of it; valid are prepare, longmix, show"),
        (["data", "prepare", "x.txt"], "the following arguments are required: --output"),
        (["report"], "report: no run folder given"),
        (["report", "nowhere"], "nowhere: no such run folder"),
        (["sample", "nowhere", "prompt=a"], "nowhere: not a run folder"),
    ],
)
def test_a_refusal_is_one_line_and_status_2_without_torch(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    outcome, err = probe(tmp_path, *arguments)
    assert outcome.startswith("2 False")
    assert err.startswith(
        f"k3train: {message}" if arguments[:2] != ["data", "prepare"] else "k3train: data prepare: "
    )
    assert message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["train", "--help"], ["data", "prepare", "-h"], ["--version"]]
)
def test_help_needs_neither_hydra_nor_torch(tmp_path: Path, arguments: list[str]) -> None:
    assert probe(tmp_path, *arguments) == ("0 False False", "")


def test_help_names_every_verb_and_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb}" in text for verb in cli.VERBS)
    assert all(option in text for options in groups().values() for option in options)
    assert "optim.lr=0.002" in text


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    assert f"k3train {verb}" in capsys.readouterr().out


def test_prepare_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = {}

    def prepare(*arguments: object, **options: object) -> str:
        seen.update(options, arguments=arguments)
        return "done"

    monkeypatch.setitem(sys.modules, "k3train.data.prepare", types.SimpleNamespace(prepare=prepare))
    assert data.main(["prepare", "a", "b", "--output", "out", "--workers", "3", "--no-resume"]) == 0
    assert seen == {
        "arguments": (["a", "b"], "out", "byte"),
        "workers": 3,
        "text_key": "text",
        "resume": False,
    }


def test_sample_passes_its_options_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("")

    def fake(*arguments: object, **options: object) -> str:
        return json.dumps([arguments, options])

    monkeypatch.setitem(sys.modules, "k3train.sample", types.SimpleNamespace(sample=fake))
    assert sample.main([str(tmp_path), "prompt=def a=", "tokens=3", "temperature=0"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == [[str(tmp_path), "def a="], {"tokens": 3, "temperature": 0.0}]
    swept = tmp_path / "optim.lr=0.1"
    swept.mkdir()
    (swept / "config.yaml").write_text("")
    assert sample.main([str(swept), "prompt=a"]) == 0
    assert json.loads(capsys.readouterr().out) == [[str(swept), "a"], {}]
    with pytest.raises(UserError, match="tokens=x: expected an integer"):
        sample.main([str(tmp_path), "prompt=a", "tokens=x"])
    with pytest.raises(UserError, match="top_k=3: no such option; valid are prompt, tokens"):
        sample.main([str(tmp_path), "prompt=a", "top_k=3"])


ON_64_NODES = [
    *("recipe=k3_pretrain", "cluster.nodes=64", "parallel.expert.size=64", "cluster.image=k3:1"),
    "cluster.volume=runs",
]


@pytest.mark.parametrize(
    ("launcher", "sign"), [("slurm", "#SBATCH --nodes=64"), ("kubernetes", "kind: PyTorchJob")]
)
def test_launch_prints_a_job_for_files_that_are_elsewhere(
    launcher: str, sign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", launcher, *ON_64_NODES]) == 0
    assert sign in capsys.readouterr().out


@pytest.mark.parametrize("joined", [False, True])
def test_launch_writes_the_same_job_to_a_file(
    joined: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", "slurm", *ON_64_NODES]) == 0
    printed = capsys.readouterr().out
    target = tmp_path / "job.sh"
    target.write_text("an older job")
    output = [f"--output={target}"] if joined else ["--output", str(target)]
    assert cli.main(["launch", "slurm", *output, *ON_64_NODES]) == 0
    assert capsys.readouterr().out == ""
    assert target.read_text() == printed
    assert list(tmp_path.iterdir()) == [target]


def test_launch_refuses_a_file_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "slurm", "--output", f"{tmp_path}/no/job.sh"]) == 2
    assert capsys.readouterr().err == (
        f"k3train: --output {tmp_path}/no/job.sh: cannot be written: No such file or directory\n"
    )
    assert cli.main(["launch", "slurm", "--output"]) == 2
    assert "--output needs the name of a file" in capsys.readouterr().err


def test_plan_prints_one_json_object(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.cli", "plan", "recipe=k3_pretrain", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60
    )
    planned = json.loads(done.stdout)
    assert planned["parameters"]["total"] / 1e9 == pytest.approx(2779.48, abs=0.01)
    assert planned["parameters"]["active"] / 1e9 == pytest.approx(104.19, abs=0.01)
    assert max(sum(rank.values()) for rank in planned["memory_bytes"]) < planned["memory_limit_bytes"]


def test_reference_is_up_to_date_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert reference.main(["--check"]) == 0
    text = reference.TARGET.read_text()
    assert all(f"| `{name}` |" in text for name in keys())
    assert "| `optim.lr` | a number | `0.002` | Learning rate at its peak" in text


def test_a_stale_reference_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reference.main([]) == 0 and reference.main(["--check"]) == 0
    reference.TARGET.write_text(reference.page().replace("0.002", "0.003"))
    assert reference.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err

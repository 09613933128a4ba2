"""Job files from configurations that try to run commands: bash runs them, and nothing but the job runs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from k3train.config import Config
from k3train.errors import UserError
from k3train.redaction import check_secrets
from launch import kubernetes, slurm

# TOUCH becomes a command that leaves a mark.
NASTY = [
    "a'; TOUCH; '",
    'a"; TOUCH; "',
    "$(TOUCH)",
    "`TOUCH`",
    "a; TOUCH #",
    "a && TOUCH & TOUCH | TOUCH",
    "a\nTOUCH\n",
    "\nON_NODE\n)\nTOUCH\n",
    "a\\'; TOUCH; \\'",
    "$'\\x27; TOUCH'",
    "$$(TOUCH) $$$(NOTE)",
    "${NOTE:-$(TOUCH)}",
    "* ? [a] {a,b} ~ !!",
    "!!python/object/apply:os.system ['TOUCH']",
    "&a [*a, <<: *a]",
    "--- # : - ? | >",
    "{node} {0} %s %(a)s",
]

SRUN = '#!/bin/bash\nprintf "%s\\0" "$@" > "$RECORDS/srun"\nwhile [[ "$1" == --* ]]; do shift; done\n"$@"\n'
SCONTROL = '#!/bin/bash\n[ "$1" = show ] && echo node0\n'
PYTHON = '#!/bin/bash\nprintf "%s\\0" "$@" > "$RECORDS/python"\nprintf "%s" "$NOTE" > "$RECORDS/note"\n'


@pytest.fixture
def bash(tmp_path: Path) -> Callable[[list[str]], None]:
    """Runs bash in an empty folder with stand-ins for all commands of a job."""
    (tmp_path / "records").mkdir()
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "RECORDS": str(tmp_path / "records"),
        **{"SLURM_SUBMIT_DIR": "/project", "SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "RANK": "0"},
        **{"SLURM_JOB_NODELIST": "node0", "SLURMD_NODENAME": "node0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    }

    def run(words: list[str], **more: str) -> None:
        subprocess.run(["bash", *words], env=environment | more, cwd=tmp_path, check=True, timeout=20)

    return run


def hostile(value: str, image: str | None = None) -> Config:
    """A configuration with `value` in every text that reaches a job file and that no rule restricts."""
    config = Config(recipe=value)
    config.run.dir, config.data.cache_dir = f"/{value}/run", f"/{value}"
    config.data.train, config.data.tokenizer = [f"/{value}/x"], f"/{value}/y"
    cluster = config.cluster
    cluster.gpu, cluster.nodes, cluster.ranks_per_node, cluster.environment = "h200", 1, 1, {"NOTE": value}
    cluster.image = image
    return config


def words(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / "records" / name).read_text().split("\0")[:-1]


@pytest.mark.parametrize("value", NASTY)
def test_slurm_runs_the_job_and_nothing_else(value: str, tmp_path: Path, bash: Any) -> None:
    mark = tmp_path / "ran"
    value = value.replace("TOUCH", f"touch {mark}")
    config = hostile(value, image=value)
    config.run.name = config.cluster.partition = config.cluster.account = value
    if "\n" in value:
        with pytest.raises(UserError, match="a line break cannot stand in a Slurm directive"):
            slurm.render(config, [])
        config.run.name, config.cluster.partition, config.cluster.account = "a", None, None
    if set(",:") & set(value):
        with pytest.raises(UserError, match="a folder that a container mounts"):
            slurm.render(config, [])
        config.cluster.image = None
    overrides = [f"run.name={value}", value]
    if "ON_NODE" in value:
        with pytest.raises(UserError, match="would end the job's text"):
            slurm.render(config, overrides)
        return
    job = tmp_path / "job.sh"
    job.write_text(slurm.render(config, overrides))
    bash(["-n", str(job)])
    bash([str(job)])
    assert not mark.exists()
    assert words(tmp_path, "python")[-len(overrides) :] == overrides
    assert (tmp_path / "records/note").read_text() == value
    if config.cluster.image is not None:
        assert f"--container-image={value}" in words(tmp_path, "srun")
    # Slurm reads directives up to the first command, each a line of its own.
    directives = [line for line in job.read_text().splitlines() if line.startswith("#SBATCH")]
    assert all(re.match(r"#SBATCH --[a-z-]+", line) for line in directives)


def expanded(text: str, environment: dict[str, str]) -> str:
    """What Kubernetes makes of `text`: $(NAME) of a known variable, and $$ as $."""
    return re.sub(
        r"\$(?:(\$)|\((.*?)\))",
        lambda found: found[1] or environment.get(found[2], found[0]),
        text,
        flags=re.DOTALL,
    )


@pytest.mark.parametrize("value", NASTY)
def test_kubernetes_runs_the_job_and_nothing_else(value: str, tmp_path: Path, bash: Any) -> None:
    mark = tmp_path / "ran"
    value = value.replace("TOUCH", f"touch {mark}")
    config = hostile(value, image=value)
    config.run.name, config.cluster.namespace, config.cluster.partition = f"a {value}", value, value
    overrides = [f"run.name={value}", value]
    text = kubernetes.render(config, overrides)
    manifest = yaml.safe_load(text)
    container = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert container["image"] == value
    assert manifest["metadata"]["namespace"] == value
    assert manifest["spec"]["runPolicy"]["schedulingPolicy"] == {"queue": value}
    assert re.fullmatch(r"[a-z][-a-z0-9]*", manifest["metadata"]["name"])
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    note = expanded(given["NOTE"], given)
    assert note == value
    (command,) = container["args"]
    bash([*container["command"][1:], expanded(command, given | {"touch": mark.name})], NOTE=note)
    assert not mark.exists()
    assert words(tmp_path, "python")[-len(overrides) :] == overrides


def test_a_control_would_find_a_command(tmp_path: Path, bash: Any) -> None:
    bash(["-c", f"echo a; touch {tmp_path / 'ran'}"])
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["A;touch x", "A$(x)", "A B", "1A", "", "A\nB", "A=B"])
def test_a_variable_has_a_name(name: str) -> None:
    config = Config()
    config.cluster.environment = {name: "x"}
    with pytest.raises(UserError, match="is no name of a variable"):
        check_secrets(config, 1)

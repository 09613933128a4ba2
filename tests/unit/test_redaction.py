"""Secrets are told from other values, refused in configurations, and in nothing that a command writes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.config import Config
from k3train.errors import UserError
from k3train.log.tracker import one_line
from k3train.redaction import MARK, check_secrets, is_secret_name, redact, secrets_of
from launch.cli import main

CANARY = "c4n4ry-5f0e9d"
VARIABLES = {
    "WANDB_API_KEY": f"{CANARY}-wandb",
    "HF_TOKEN": f"hf_{CANARY}",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}-aws",
    "DB_PASSWORD": f"{CANARY}-db",
    "ALERTS_URL": f"http://127.0.0.1:9/{CANARY}-hook",
    "HTTPS_PROXY": f"http://user:{CANARY}@127.0.0.1:9",
}
RUN = ["recipe=tiny_dense_check", "data.tokenizer=byte", "run.steps=2", "log.alerts.webhook_env=ALERTS_URL"]


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "db_password", "X_APIKEY"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "MAX_TOKENS", "KEYBOARD", "SECRETARY", "PATH", "TOKEN_COUNT"],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_a_path_to_a_secret_is_none() -> None:
    environment = {
        "GOOGLE_APPLICATION_CREDENTIALS": "/etc/google/key.json",
        "A_TOKEN": "short",
        "B_TOKEN": "x" * 8,
    }
    assert secrets_of(environment) == {"xxxxxxxx": "B_TOKEN"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"wandb: bad key {VARIABLES['WANDB_API_KEY']}!", f"wandb: bad key {MARK}!"),
        ("GET https://me:pw@host/x failed", f"GET https://{MARK}@host/x failed"),
        ("wandb_api_key=abcdefgh: no such key", f"wandb_api_key={MARK}: no such key"),
        ("{MY_TOKEN: 'a b', B: 1}", f"{{MY_TOKEN: {MARK}, B: 1}}"),
        ('export A_PASSWORD="$(cat f)"', 'export A_PASSWORD="$(cat f)"'),
        (
            "quote values: key='value'; tokens=3, https://host/a@b",
            "quote values: key='value'; tokens=3, https://host/a@b",
        ),
    ],
)
def test_a_message_leaves_secrets_out(text: str, shown: str) -> None:
    assert redact(text, VARIABLES) == shown


def test_a_failed_sink_says_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VARIABLES["WANDB_API_KEY"])
    assert one_line(RuntimeError(f"401\nfor {VARIABLES['WANDB_API_KEY']}")) == f"401 for {MARK}"


def _set(config: Config, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    setattr(getattr(config, section), name, value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cluster.environment", {"HF_TOKEN": CANARY}, "cluster.environment sets HF_TOKEN, a secret"),
        (
            "cluster.environment",
            {"NOTE": VARIABLES["HF_TOKEN"]},
            "cluster.environment has what the variable HF_TOKEN",
        ),
        ("cluster.setup", [f"export WANDB_API_KEY={CANARY}"], "cluster.setup sets WANDB_API_KEY, a secret"),
        ("cluster.image", f"https://me:{CANARY}@registry/x", "cluster.image has a URL with a user"),
        ("run.name", f"a-{VARIABLES['DB_PASSWORD']}-b", "run.name has what the variable DB_PASSWORD holds"),
        ("run.name", VARIABLES["ALERTS_URL"], "run.name has what the variable ALERTS_URL holds"),
        ("data.train", ["a", f"s3://me:{CANARY}@bucket/x"], "data.train has a URL with a user"),
        ("run.dir", "a\0b", "run.dir: has a NUL character"),
    ],
)
def test_a_configuration_with_a_secret_is_refused(
    key: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, secret in VARIABLES.items():
        monkeypatch.setenv(name, secret)
    config = Config()
    config.log.alerts.webhook_env = "ALERTS_URL"
    check_secrets(config, 1)
    _set(config, key, value)
    with pytest.raises(UserError, match=said) as refused:
        check_secrets(config, 1)
    assert CANARY not in str(refused.value)


def test_what_is_no_secret_passes() -> None:
    config = Config()
    config.cluster.environment = {"NCCL_DEBUG": "WARN", "SSL_KEY": "/etc/key.pem", "A_TOKEN": ""}
    config.cluster.setup = ['export WANDB_API_KEY="$(cat /run/secrets/wandb)"', "export B_TOKEN=$C"]
    config.cluster.image = "registry.example:5000/team/k3train@sha256:abc"
    check_secrets(config, 1)


COMMANDS = [
    ["plan", *RUN, "out=OUT"],
    ["plan", *RUN, "--json"],
    ["launch", "slurm", "--output", "OUT/job.sh", *RUN],
    ["launch", "kubernetes", "--output", "OUT/job.yaml", *RUN, "cluster.image=registry/x"],
    ["launch", "slurm", *RUN, f"cluster.environment.HF_TOKEN={VARIABLES['HF_TOKEN']}"],
    ["plan", *RUN, "run.name=${oc.env:HF_TOKEN}"],
    ["plan", *RUN, f"wandb_api_key={VARIABLES['WANDB_API_KEY']}"],
    ["plan", *RUN, f"data.sequence_length={VARIABLES['WANDB_API_KEY']}"],
    ["doctor"],
]


def test_no_command_writes_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, secret in VARIABLES.items():
        monkeypatch.setenv(name, secret)
    (tmp_path / "out").mkdir()
    for command in COMMANDS:
        with contextlib.suppress(SystemExit):
            main([word.replace("OUT", str(tmp_path / "out")) for word in command])
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"job.sh", "job.yaml", "plan.html"} <= {path.name for path in written}
    assert [path for path in written if CANARY.encode() in path.read_bytes()] == []
    said = capfd.readouterr()
    assert "k3train can train here" in said.out and "sets HF_TOKEN, a secret by its name" in said.err
    assert CANARY not in said.out + said.err


@pytest.mark.slow
def test_no_run_writes_a_secret(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["log.wandb=offline", "checkpoint.every=2", "log.tensorboard=true", "log.alerts.stall=1.001"]
    command = [sys.executable, "-m", "launch.cli", "train", *RUN, f"run.dir={run}", *options]
    done = subprocess.run(
        command, env={**os.environ, **VARIABLES}, cwd=tmp_path, capture_output=True, timeout=110, check=True
    )
    assert main(["report", str(run)]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "report.html", "summary.json"} <= {path.name for path in files}
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY.encode() not in done.stdout + done.stderr

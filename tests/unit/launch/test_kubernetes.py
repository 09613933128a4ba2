"""The PyTorchJob against a golden file and the part of Kubeflow's schema that it uses."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from k3train.config import Config
from k3train.errors import UserError
from launch import kubernetes, pod

GOLDEN = Path(__file__).parents[2] / "golden"
SCHEMA = json.loads((GOLDEN / "pytorchjob.schema.json").read_text())
OVERRIDES = [
    "recipe=h200_small",
    "run.name=it's 1 run",
    "data.train=[/data/$(ls) web]",
    "run.dir=${oc.env:HOME}/r",
]


def two_nodes() -> Config:
    config = Config(recipe="h200_small")
    config.run.name = "It's 1 run"
    cluster = config.cluster
    cluster.nodes, cluster.ranks_per_node, cluster.gpus_per_node, cluster.gpu = 2, 4, 8, "h200"
    cluster.image, cluster.namespace = "registry.example/k3train:0.1.0", "research"
    cluster.volume, cluster.restarts = "team-runs", 9
    cluster.partition, cluster.account, cluster.time_limit = "batch", "team-a", "1-06:30:00"
    cluster.setup = ["ulimit -l unlimited"]
    cluster.environment = {"NCCL_DEBUG": "WARN", "NOTE": "$(RANK) stays"}
    return config


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    replicas = manifest["spec"]["pytorchReplicaSpecs"].values()
    return [replica["template"]["spec"]["containers"][0] for replica in replicas]


def test_manifest_is_the_golden_file() -> None:
    assert kubernetes.render(two_nodes(), OVERRIDES) == (GOLDEN / "h200_small.pytorchjob.yaml").read_text()


@pytest.mark.parametrize("gpu", ["h200", "cpu"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_manifest_follows_the_schema(gpu: str, nodes: int) -> None:
    config = two_nodes()
    config.cluster.gpu, config.cluster.nodes = gpu, nodes
    manifest = yaml.safe_load(kubernetes.render(config, OVERRIDES))
    jsonschema.validate(manifest, SCHEMA)
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert sum(replica["replicas"] for replica in replicas.values()) == nodes
    expected = {"limits": {"nvidia.com/gpu": "4"}} if gpu == "h200" else {"requests": {"cpu": "4"}}
    assert [container["resources"] for container in containers(manifest)] == [expected] * len(replicas)


def test_schema_refuses_what_kubernetes_would() -> None:
    good = yaml.safe_load(kubernetes.render(two_nodes(), []))
    for path, value in {
        ("metadata", "name"): "Upper_Case",
        ("spec", "runPolicy", "activeDeadlineSeconds"): "24:00:00",
        ("spec", "runPolicy", "backoffLimit"): -1,
        ("spec", "pytorchReplicaSpecs", "Master", "replicas"): 2,
        ("spec", "pytorchReplicaSpecs", "Master", "restartPolicy"): "OnSave",
        ("metadata", "labels"): {"account": "-team"},
        ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers"): [],
    }.items():
        bad = copy.deepcopy(good)
        parent = bad
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, SCHEMA)


def test_agent_gets_its_place_and_every_override_unharmed(tmp_path: Path) -> None:
    """Run the container's own script with a python that prints its arguments."""
    container = containers(yaml.safe_load(kubernetes.render(two_nodes(), OVERRIDES)))[1]
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script = (
        container["args"][0].replace("$$(", "$(").replace("ulimit -l unlimited", ":")
    )  # as the kubelet does
    place = {"RANK": "1", "MASTER_ADDR": "run-master-0", "MASTER_PORT": "29500"}
    printed = subprocess.run(
        [*container["command"], script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **place}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert printed == [
        *("-m", "launch.pod", "--nnodes", "2", "--nproc-per-node", "4", "--node-rank", "1"),
        *("--master-addr", "run-master-0", "--master-port", "29500", "-m", "launch.train", *OVERRIDES),
    ]


def test_kubernetes_expands_nothing_in_values() -> None:
    container = containers(yaml.safe_load(kubernetes.render(two_nodes(), OVERRIDES)))[0]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    assert values["NOTE"] == "$$(RANK) stays"
    assert "$$(ls)" in container["args"][0]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("24:00:00", 86400),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("1-2:30:05", 95405),
    ],
)
def test_time_limit_in_seconds(limit: str, expected: int) -> None:
    assert kubernetes.seconds(limit) == expected


def test_every_pod_works_in_the_volume_that_keeps_the_runs() -> None:
    manifest = yaml.safe_load(kubernetes.render(two_nodes(), OVERRIDES))
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        [container] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"name": "runs", "persistentVolumeClaim": {"claimName": "team-runs"}} in pod["volumes"]
        assert container["workingDir"] == mounts["runs"]
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)


def test_one_node_may_do_without_a_volume() -> None:
    config = two_nodes()
    config.cluster.nodes, config.cluster.volume = 1, None
    manifest = yaml.safe_load(kubernetes.render(config, OVERRIDES))
    jsonschema.validate(manifest, SCHEMA)
    [container] = containers(manifest)
    assert "workingDir" not in container


@pytest.mark.parametrize(
    ("agent", "steps_saved", "expected"),
    [(0, [3, 5], 0), (0, [3], 143), (0, [], 143), (2, [], 2), (1, [3], 138), (1, [5], 138)],
    ids=["complete", "stopped and saved", "stopped at once", "refused", "crashed", "crashed at the end"],
)
def test_a_pod_ends_with_what_the_operator_acts_on(
    agent: int, steps_saved: list[int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below 128 the operator gives up, from 128 on it starts the pod anew, and 0 is a success."""
    for step in steps_saved:
        (tmp_path / f"run/checkpoints/step-{step:08d}").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000005.partial").mkdir(parents=True)
    monkeypatch.setattr(pod.torchrun, "run", lambda arguments: agent)
    place = ["--nnodes", "1", "--nproc-per-node", "2"]
    overrides = ["recipe=tiny", "run.steps=5", f"run.dir={tmp_path}/run"]
    assert pod.main([*place, "-m", "launch.train", *overrides]) == expected


def test_a_pod_stopped_by_a_signal_is_not_a_success(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start(
        "launch.pod", "--standalone", "--nproc-per-node", "2", "-m", "launch.train", "recipe=tiny",
        f"run.dir={tmp_path}/run", fake="wait",
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"run/ready-{rank}").exists() for rank in (0, 1)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert all((tmp_path / f"run/saved-{rank}").exists() for rank in (0, 1))


def test_a_pod_that_refuses_is_not_started_again(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, _, err = run(
        "launch.pod", "--standalone", "--nproc-per-node", "2", "-m", "launch.train", "recipe=tiny",
        f"run.dir={tmp_path}/run", fake="refuse",
    )  # fmt: skip
    assert (code, err) == (2, "k3train: data.train=[x]: torn\n")


@pytest.mark.parametrize(
    ("key", "value"),
    [("account", "team a"), ("account", "-team"), ("account", "a" * 64), ("volume", "Runs"), ("volume", "")],
)
def test_names_that_kubernetes_refuses_are_refused_here(key: str, value: str) -> None:
    config = two_nodes()
    setattr(config.cluster, key, value)
    with pytest.raises(UserError, match=f"cluster.{key}={value}: no valid name in Kubernetes"):
        kubernetes.render(config, [])
    config = two_nodes()
    config.cluster.account = "Team_1.b" + "x" * 55
    jsonschema.validate(yaml.safe_load(kubernetes.render(config, [])), SCHEMA)


def test_refusals_name_the_key() -> None:
    config = two_nodes()
    config.cluster.volume = None
    with pytest.raises(UserError, match="cluster.volume=null: 2 nodes need one folder"):
        kubernetes.render(config, [])
    config = two_nodes()
    config.cluster.time_limit = "a day"
    with pytest.raises(UserError, match="cluster.time_limit=a day"):
        kubernetes.render(config, [])
    config = two_nodes()
    config.cluster.image = None
    with pytest.raises(UserError, match="cluster.image=null"):
        kubernetes.render(config, [])
    config = two_nodes()
    config.run.name = "___"
    with pytest.raises(UserError, match="run.name=___"):
        kubernetes.render(config, [])

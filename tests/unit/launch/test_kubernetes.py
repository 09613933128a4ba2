"""The PyTorchJob against a golden file and the part of Kubeflow's schema that it uses."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from k3train.config import Config
from k3train.errors import UserError
from launch import kubernetes

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
        ("spec", "pytorchReplicaSpecs", "Master", "replicas"): 2,
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
        *("-m", "launch.torchrun", "--nnodes", "2", "--nproc-per-node", "4", "--node-rank", "1"),
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


def test_refusals_name_the_key() -> None:
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

"""A Kubernetes manifest for a configuration: a Kubeflow PyTorchJob, one torchrun agent a pod.

The training operator gives every pod MASTER_ADDR, MASTER_PORT and its own place as RANK; the agent takes them
as the node's, and the ranks get their own. Exit statuses decide on a restart: see `launch.pod`.
Fields: kubeflow/training-operator v1.9.0, pkg/apis/kubeflow.org/v1 (common_types.go, pytorch_types.go).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from k3train.config import Config
from k3train.errors import UserError

NAME_LENGTH = 50
"""Of the 63 characters of a pod's name; the operator appends the role and the number."""
PORT = 29500
VOLUME = "/volume"
"""Where `cluster.volume` is mounted, and the working directory: relative paths of a run lie in it."""
LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
OBJECT = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"


def render(config: Config, overrides: Sequence[str]) -> str:
    """The manifest that trains `overrides` on the nodes of the resolved `config`, as YAML.

    Raises UserError without a container image, for several nodes without a volume, for a time limit that is
    none, and for a name that Kubernetes does not take.
    """
    _check_names(config)
    return yaml.dump(_job(config, overrides), Dumper=_Dumper, sort_keys=False, width=10_000)


def _job(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    cluster = config.cluster
    policy: dict[str, Any] = {
        "cleanPodPolicy": "Running",
        "activeDeadlineSeconds": seconds(cluster.time_limit),
        "backoffLimit": cluster.restarts,
    }
    if cluster.partition is not None:
        policy["schedulingPolicy"] = {"queue": cluster.partition}
    metadata: dict[str, Any] = {"name": _name(config.run.name), "namespace": cluster.namespace}
    if cluster.account is not None:
        metadata["labels"] = {"account": cluster.account}
    replica = {"restartPolicy": "ExitCode", "template": {"spec": _pod(config, overrides)}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if cluster.nodes > 1:
        replicas["Worker"] = {"replicas": cluster.nodes - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }


def _pod(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    cluster = config.cluster
    if cluster.image is None:
        raise UserError(
            "cluster.image=null: Kubernetes runs container images; set cluster.image=REGISTRY/NAME:TAG"
        )
    ranks = cluster.ranks_per_node or cluster.gpus_per_node
    if cluster.gpu == "cpu":
        resources = {"requests": {"cpu": str(ranks * config.run.threads)}}
    else:
        resources = {"limits": {"nvidia.com/gpu": str(ranks)}}
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(config.run.threads), **cluster.environment}
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this name
        "image": cluster.image,
        "command": ["bash", "-euc"],
        "args": [_literal("\n".join([*cluster.setup, _agent(config, overrides)]) + "\n")],
        "env": [{"name": name, "value": _literal(value)} for name, value in environment.items()],
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "resources": resources,
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    # NCCL and the data workers need more than the 64 MiB that a container gets.
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if cluster.volume is not None:
        container["workingDir"] = VOLUME
        container["volumeMounts"].append({"name": "runs", "mountPath": VOLUME})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": cluster.volume}})
    return {
        "terminationGracePeriodSeconds": cluster.signal_seconds,
        "containers": [container],
        "volumes": volumes,
    }


def _agent(config: Config, overrides: Sequence[str]) -> str:
    """The command of one pod; `exec`, so that the signal which ends a pod reaches the agent."""
    cluster = config.cluster
    words = [
        "exec python -m launch.pod",
        f"--nnodes {cluster.nodes} --nproc-per-node {cluster.ranks_per_node or cluster.gpus_per_node}",
        '--node-rank "$RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"',
        "-m launch.train",
        *(shlex.quote(override) for override in overrides),
    ]
    return " \\\n    ".join(words)


def seconds(time_limit: str) -> int:
    """Slurm's forms of a time limit: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit)
    if match is None:
        raise UserError(f"cluster.time_limit={time_limit}: no time limit; write hours:minutes:seconds")
    days, *parts = (None if group is None else int(group) for group in match.groups())
    given = [part for part in parts if part is not None]
    if days is None and len(given) < 3:  # minutes come first
        given.insert(0, 0)
    hours, minutes, rest = [*given, 0, 0][:3]
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def _check_names(config: Config) -> None:
    cluster = config.cluster
    if cluster.nodes > 1 and cluster.volume is None:
        raise UserError(
            f"cluster.volume=null: {cluster.nodes} nodes need one folder for the run; "
            "set cluster.volume to the name of a ReadWriteMany claim"
        )
    for key, name, pattern, valid in (
        ("volume", cluster.volume, OBJECT, "lower-case letters and digits, with - and . between them"),
        ("account", cluster.account, LABEL, "at most 63 letters and digits, with -, _ and . between them"),
    ):
        if name is not None and not re.fullmatch(pattern, name):
            raise UserError(f"cluster.{key}={name}: no valid name in Kubernetes; use {valid}")


def _name(run_name: str) -> str:
    """The run's name in the letters that Kubernetes allows."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")[:NAME_LENGTH].strip("-")
    if not name:
        raise UserError(f"run.name={run_name}: Kubernetes needs a name with a letter or a digit")
    return name if name[0].isalpha() else f"run-{name}"


def _literal(text: str) -> str:
    """Keep Kubernetes from expanding $(NAME) in a value, and from taking $$ for an escaped $."""
    return re.sub(r"\$+(?=\()|\${2,}", lambda found: 2 * found[0], text)


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, and repeats what is shared where YAML would refer to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)

"""A Slurm job for a configuration: one torchrun agent a node, saved before the time limit and requeued.

The batch script is for `sbatch`, from the folder that holds the project. Slurm signals the batch shell
`cluster.signal_seconds` ahead of the limit; the shell passes the signal to `srun`, which delivers it to the
agent on every node, which forwards it to its ranks. They save and end with status 75, and the job is
requeued; so is one that has hung or lost a rank, `cluster.restarts` times, and never one that would end the
same way. The checkpoint of the last step tells a run that is complete from one that was stopped.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from k3train.config import Config
from k3train.errors import UserError
from k3train.exit_status import FINAL, SAVED

from .finished import last_checkpoint

HELPERS = 3
"""Threads of a GPU rank beside its own `run.threads`: the reader, the checkpoint's writer, the network."""

END_OF_NODE = "ON_NODE"
"""Ends what runs on each node, in the script."""

BATCH = """\
set -uo pipefail

{environment}
export RENDEZVOUS_HOST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export RENDEZVOUS_PORT=$((20000 + SLURM_JOB_ID % 20000))

on_node=$(cat <<'ON_NODE'
{node}
ON_NODE
)

srun {srun} bash -euc "$on_node" &
step=$!
limit_is_near=
trap 'limit_is_near=1; signalled=1; kill -USR1 "$step" 2>/dev/null' USR1

# Every trapped signal ends a wait early; bash keeps the status of a step that has ended for the next one.
signalled=1
while [ -n "$signalled" ]; do
    signalled=
    wait "$step"
    status=$?
done
case "$status" in
    0 | {final}) again= ;;
    {saved}) again=1 ;;
    *) [ -z "$limit_is_near" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ] && again=1 || again= ;;
esac
if [ -n "$again" ] && [ ! -d {last_checkpoint} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def render(config: Config, overrides: Sequence[str]) -> str:
    """The batch script that trains `overrides` on the nodes of the resolved `config`.

    Raises UserError for a value that cannot stand in a directive.
    """
    environment = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(config.run.threads),
        **config.cluster.environment,
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    if config.cluster.image is None:
        exports.insert(0, 'export PATH="$SLURM_SUBMIT_DIR/.venv/bin:$PATH"')
    node = "\n".join([*config.cluster.setup, _agent(config, overrides)])
    if END_OF_NODE in node.splitlines():
        raise UserError(
            f"a line {END_OF_NODE!r} in a value or in cluster.setup would end the job's text; change it"
        )
    body = BATCH.format(
        environment="\n".join(exports),
        node=node,
        srun=" ".join(_srun_options(config)),
        final=" | ".join(map(str, FINAL)),
        saved=SAVED,
        restarts=config.cluster.restarts,
        last_checkpoint=shlex.quote(str(last_checkpoint(config))),
    )
    return "\n".join(["#!/bin/bash", *_directives(config), "", body])


def _directives(config: Config) -> list[str]:
    cluster = config.cluster
    ranks = _ranks_per_node(config)
    options: dict[str, object] = {"job-name": config.run.name, "nodes": cluster.nodes, "ntasks-per-node": 1}
    whole_node = cluster.gpu != "cpu" and ranks == cluster.gpus_per_node
    if cluster.gpu != "cpu":
        options["gpus-per-node"] = ranks
    if not whole_node:
        options["cpus-per-task"] = ranks * (config.run.threads + (HELPERS if cluster.gpu != "cpu" else 0))
    options |= {"partition": cluster.partition, "account": cluster.account, "time": cluster.time_limit}
    options |= {
        "signal": f"B:USR1@{cluster.signal_seconds}",
        "output": "slurm-%x-%j.log",
        "open-mode": "append",
    }
    lines = [_directive(name, str(value)) for name, value in options.items() if value is not None]
    flags = ["requeue", *(["exclusive", "mem=0"] if whole_node else [])]
    return lines + [f"#SBATCH --{flag}" for flag in flags]


def _directive(name: str, value: str) -> str:
    if not value.isprintable():
        raise UserError(f"{name} {value!r}: a line break cannot stand in a Slurm directive; remove it")
    return f"#SBATCH --{name}={shlex.quote(value)}"


def _srun_options(config: Config) -> list[str]:
    options = ["--label", "--kill-on-bad-exit=1", "--cpu-bind=none"]
    if config.cluster.image is not None:
        project = '"$SLURM_SUBMIT_DIR"'
        mounts = [f"{project}:{project}"]
        mounts += [f"{shlex.quote(folder)}:{shlex.quote(folder)}" for folder in _absolute_folders(config)]
        options.append(f"--container-image={shlex.quote(config.cluster.image)}")
        options += [f"--container-mounts={','.join(mounts)}", f"--container-workdir={project}"]
    return options


def _absolute_folders(config: Config) -> list[str]:
    """Folders outside the project that the run reads or writes."""
    data = config.data
    files = [*data.train, *data.valid, *([] if data.tokenizer == "byte" else [data.tokenizer])]
    folders = [config.run.dir, *([data.cache_dir] if data.cache_dir else [])]
    folders += [str(Path(file).parent) for file in files]
    absolute = sorted({folder for folder in folders if folder.startswith("/")})
    if odd := next((folder for folder in absolute if set(",:") & set(folder)), None):
        raise UserError(f"{odd!r}: a folder that a container mounts can have neither , nor : in its name")
    return absolute


def _agent(config: Config, overrides: Sequence[str]) -> str:
    """The command of one node's agent; `exec`, so that the step's signals reach it."""
    words = [
        "exec python -m launch.torchrun",
        f"--nnodes {config.cluster.nodes} --nproc-per-node {_ranks_per_node(config)}",
        '--rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-backend c10d',
        '--rdzv-endpoint "$RENDEZVOUS_HOST:$RENDEZVOUS_PORT"',
        "--rdzv-conf is_host=$((SLURM_NODEID == 0))",
        '--local-addr "$SLURMD_NODENAME"',
        "-m launch.train",
        *(shlex.quote(override) for override in overrides),
    ]
    return " \\\n    ".join(words)


def _ranks_per_node(config: Config) -> int:
    return config.cluster.ranks_per_node or config.cluster.gpus_per_node

"""The Slurm job against golden files, and run by bash with stand-ins for srun, scontrol and python."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3train.config import Config
from k3train.errors import UserError
from launch import slurm

GOLDEN = Path(__file__).parents[2] / "golden"
OVERRIDES = [
    "recipe=h200_small",
    "run.name=it's 1 run",
    "data.train=[/data/$(ls) web]",
    "run.dir=${oc.env:HOME}/r",
]

# Starts one task a node, each in a process group of its own, and passes signals on, as Slurm's does.
SRUN = r"""#!/bin/bash
echo "$@" > "$RECORDS/srun"
while [[ "$1" == --* ]]; do shift; done
set -m
worst=0
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node SLURMD_NODENAME=node$node "$@" &
    tasks+=($!)
done
trap 'kill -USR1 "${tasks[@]}"' USR1
for task in "${tasks[@]}"; do
    while true; do
        wait "$task"; code=$?
        kill -0 "$task" 2>/dev/null || break
    done
    wait "$task"; code=$?
    ((code > worst)) && worst=$code
done
exit $worst
"""

SCONTROL = r"""#!/bin/bash
if [ "$1" = show ]; then printf 'node0\nnode1\n'; else echo "$@" >> "$RECORDS/requeue"; fi
"""

# Stands for torchrun's agent: notes how it was started, then ends as it is told or waits to be signalled.
PYTHON = r"""#!/bin/bash
save() {
    touch "$RECORDS/saving.$SLURM_NODEID"
    for ((i = 0; i < 400; i++)); do
        if [ -z "${SLOW_SAVE:-}" ] || [ -e "$RECORDS/disk" ]; then break; fi
        sleep 0.05
    done
    touch "$RECORDS/saved.$SLURM_NODEID"
    exit ${CODE_AFTER_SIGNAL:-0}
}
trap save USR1
printf '%s\0' "$@" > "$RECORDS/draft.$SLURM_NODEID"
env > "$RECORDS/environment.$SLURM_NODEID"
mv "$RECORDS/draft.$SLURM_NODEID" "$RECORDS/started.$SLURM_NODEID"
if [ -n "${CODE:-}" ]; then exit "$CODE"; fi
for ((i = 0; i < 600; i++)); do sleep 0.05; done
exit 99
"""


def two_nodes() -> Config:
    config = Config(recipe="h200_small")
    config.run.name, config.run.dir = "it's 1 run", "/scratch/it's"
    cluster = config.cluster
    cluster.nodes, cluster.ranks_per_node, cluster.gpus_per_node, cluster.gpu = 2, 8, 8, "h200"
    cluster.partition, cluster.account, cluster.signal_seconds = "batch", "team-a", 240
    cluster.setup = ["SETUP_RAN=on-$SLURM_NODEID", "export SETUP_RAN"]
    cluster.environment = {"NCCL_DEBUG": "WARN", "NOTE": "a $(b) 'c'"}
    return config


def in_container() -> Config:
    config = two_nodes()
    config.cluster.image = "registry.example#k3train:0.1.0"
    config.cluster.nodes, config.cluster.ranks_per_node = 1, 2
    config.data.train, config.data.tokenizer = ["/data/web", "local/books"], "/models/k3/tiktoken.model"
    return config


class Job:
    """The rendered script, run by bash with the stand-ins first on PATH."""

    def __init__(self, folder: Path, config: Config, **environment: str) -> None:
        self.records = folder / "records"
        self.records.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "job.sh").write_text(slurm.render(config, OVERRIDES))
        given = {
            "PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "RECORDS": str(self.records),
            "SLURM_SUBMIT_DIR": str(folder / "project"),
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_NNODES": str(config.cluster.nodes),
        }
        self.process = subprocess.Popen(
            ["bash", str(folder / "job.sh")], env=given | environment, start_new_session=True
        )

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 20
        while not all((self.records / name).exists() for name in names):
            assert time.monotonic() < deadline, f"no {names}"
            time.sleep(0.02)

    def arguments(self, node: int) -> list[str]:
        return (self.records / f"started.{node}").read_text().split("\0")[:-1]

    def environment(self, node: int) -> dict[str, str]:
        lines = (self.records / f"environment.{node}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def requeued(self) -> str:
        record = self.records / "requeue"
        return record.read_text().strip() if record.exists() else ""


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


@pytest.mark.parametrize(("config", "golden"), [(two_nodes(), "h200_small"), (in_container(), "container")])
def test_job_is_the_golden_file(config: Config, golden: str) -> None:
    assert slurm.render(config, OVERRIDES) == (GOLDEN / f"{golden}.slurm.sh").read_text()


def test_every_node_joins_one_rendezvous(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, two_nodes(), CODE="0")
    jobs.append(job)
    assert job.process.wait(timeout=20) == 0
    for node in (0, 1):
        assert job.arguments(node) == [
            *("-m", "launch.torchrun", "--nnodes", "2", "--nproc-per-node", "8"),
            *("--rdzv-id", "1234567.0", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"node0:{20000 + 1234567 % 20000}"),
            *("--rdzv-conf", f"is_host={1 - node}", "--local-addr", f"node{node}"),
            *("-m", "launch.train", *OVERRIDES),
        ]
        environment = job.environment(node)
        assert environment["SETUP_RAN"] == f"on-{node}"
        assert environment["NOTE"] == "a $(b) 'c'"
        assert environment["OMP_NUM_THREADS"] == "1"
    assert job.requeued() == ""


def test_signal_before_the_limit_reaches_every_node_and_requeues(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, two_nodes(), CODE_AFTER_SIGNAL="75")
    jobs.append(job)
    job.wait_for("started.0", "started.1")
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(timeout=20) == 75
    assert (job.records / "saved.0").exists() and (job.records / "saved.1").exists()
    assert job.requeued() == "requeue 1234567"


def test_a_second_signal_while_the_run_saves_does_not_lose_the_requeue(
    tmp_path: Path, jobs: list[Job]
) -> None:
    job = Job(tmp_path, two_nodes(), SLOW_SAVE="1", CODE_AFTER_SIGNAL="75")
    jobs.append(job)
    job.wait_for("started.0", "started.1")
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("saving.0", "saving.1")
    for _ in range(2):
        job.process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        assert job.process.poll() is None, "the job ended ahead of its step"
    assert job.requeued() == ""
    (job.records / "disk").touch()
    assert job.process.wait(timeout=20) == 75
    assert (job.records / "saved.0").exists() and (job.records / "saved.1").exists()
    assert job.requeued() == "requeue 1234567"


def test_a_complete_run_is_not_requeued(tmp_path: Path, jobs: list[Job]) -> None:
    config = two_nodes()
    config.run.dir, config.run.steps = str(tmp_path / "it's"), 7
    job = Job(tmp_path, config)
    jobs.append(job)
    job.wait_for("started.0", "started.1")
    (tmp_path / "it's/checkpoints/step-00000007").mkdir(parents=True)
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(timeout=20) == 0
    assert (job.records / "saved.0").exists()
    assert job.requeued() == ""


def test_a_failed_save_is_not_requeued(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, two_nodes(), CODE_AFTER_SIGNAL="5")
    jobs.append(job)
    job.wait_for("started.0", "started.1")
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(timeout=20) == 5
    assert job.requeued() == ""


def test_exit_status_is_the_run_s(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, two_nodes(), CODE="2")
    jobs.append(job)
    assert job.process.wait(timeout=20) == 2
    assert job.requeued() == ""


@pytest.mark.parametrize(
    ("code", "earlier", "again"), [("124", "3", True), ("1", "20", False), ("3", "0", False)]
)
def test_a_hang_is_requeued_so_often_and_a_divergence_never(
    code: str, earlier: str, again: bool, tmp_path: Path, jobs: list[Job]
) -> None:
    job = Job(tmp_path, two_nodes(), CODE=code, SLURM_RESTART_COUNT=earlier)
    jobs.append(job)
    assert job.process.wait(timeout=20) == int(code)
    assert bool(job.requeued()) == again


def test_a_line_break_cannot_leave_its_directive() -> None:
    config = two_nodes()
    config.cluster.partition = "batch\nrm -r runs"
    with pytest.raises(UserError, match="partition .*line break"):
        slurm.render(config, [])


def test_part_of_a_node_s_gpus_comes_with_cores_and_all_of_them_with_the_node() -> None:
    config = in_container()
    config.run.threads = 4
    directives = [line for line in slurm.render(config, []).splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --gpus-per-node=2" in directives
    assert f"#SBATCH --cpus-per-task={2 * (4 + slurm.HELPERS)}" in directives
    assert "#SBATCH --exclusive" not in directives
    whole = slurm.render(two_nodes(), [])
    assert "#SBATCH --exclusive" in whole and "cpus-per-task" not in whole


def test_cpu_nodes_ask_for_cores_instead_of_gpus() -> None:
    config = two_nodes()
    config.cluster.gpu, config.run.threads = "cpu", 3
    directives = [line for line in slurm.render(config, []).splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --cpus-per-task=24" in directives
    assert not [line for line in directives if "gpus" in line or "exclusive" in line]

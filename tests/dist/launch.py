"""Runs one function on several processes, as torchrun would, and collects what each returns."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.dist.nursery import REPOSITORY, Nursery, Worker, path_of

Process = subprocess.Popen[bytes] | Worker


class WorkersFailed(RuntimeError):
    """A worker ended badly or too late; the message holds what every rank printed."""


def run_workers(
    target: str, world_size: int, args: dict[str, Any] | None = None, timeout: float = 120
) -> list[Any]:
    """Call `target` ("module:function") with keyword arguments `args` on every rank.

    The function is called after `parallel.cpu.enable_cpu`, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
    and MASTER_PORT set; it need not leave its process groups. As under torchrun, the first rank that fails
    ends the others.

    Args:
        args: must be JSON.
        timeout: seconds for all ranks together.

    Returns:
        each rank's return value, which must be JSON.

    Raises:
        WorkersFailed: a rank failed or the time ran out.
    """
    with tempfile.TemporaryDirectory() as folder:
        workers = start_workers(target, world_size, args or {}, Path(folder))
        try:
            failure = _wait(workers, timeout)
        finally:
            stop_workers(workers)
        if failure:
            raise WorkersFailed(
                f"{target} on {world_size} ranks: {failure}\n{_outputs(Path(folder), world_size)}"
            )
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]


def start_workers(target: str, world_size: int, args: dict[str, Any], folder: Path) -> list[Process]:
    """Start the ranks and return at once; rank r prints to `folder/r.out` and answers in `folder/r.json`.

    Without CUDA they are forked from a process that has imported what they need.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    workers: list[Process] = []
    for rank in range(world_size):
        environment = {
            **os.environ,
            **address,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path_of(os.environ),
        }
        if torch.cuda.is_available():
            workers.append(_spawn(target, json.dumps(args), folder, rank, environment))
        else:
            workers.append(_nursery().start(target, json.dumps(args), folder, rank, environment))
    return workers


@cache
def _nursery() -> Nursery:
    return Nursery()


def _spawn(
    target: str, args: str, folder: Path, rank: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    with (folder / f"{rank}.out").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.dist.launch", target, args, str(folder)],
            env=environment,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_workers(workers: Sequence[Process]) -> None:
    """Kill what still runs, with the processes that it started."""
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.wait()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on.

    The ranks listen there seconds later: it lies below the ports that other sockets are given meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait(workers: Sequence[Process], timeout: float) -> str | None:
    """Wait until all ranks end well (None) or one does not (how)."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [f"rank {rank} exited with {code}" for rank, code in enumerate(codes) if code]
        if failed:
            return ", ".join(failed)
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return f"not done within {timeout:g} s"
        time.sleep(0.02)


def _outputs(folder: Path, world_size: int) -> str:
    texts = [(folder / f"{rank}.out").read_text(errors="replace") for rank in range(world_size)]
    return "\n".join(f"--- rank {rank}\n{text[-8000:]}" for rank, text in enumerate(texts))


def work(target: str, args: str, folder: str) -> None:
    """Be one rank: call the function, write its answer."""
    from parallel.cpu import enable_cpu

    enable_cpu()
    answer_file = Path(folder) / f"{os.environ['RANK']}.json"
    module, _, function = target.partition(":")
    answer = getattr(importlib.import_module(module), function)(**json.loads(args))
    answer_file.write_text(json.dumps(answer))
    _leave()


def _leave() -> None:
    """Out of the process groups; on GPUs without taking them down: a third of a second each with NCCL."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if torch.cuda.is_available():
        dist.barrier()
        torch.cuda.synchronize()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    from parallel.groups import destroy

    destroy()


if __name__ == "__main__":
    work(*sys.argv[1:])

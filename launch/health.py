"""`k3train doctor --health`: the checks of `fault.health` without a run.

Here on all GPUs of this machine, or on two CPU ranks; under torchrun, as `-m launch.health`, on its ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3train.exit_status import DONE, UNHEALTHY

CPU_RANKS = 2


def main(folder: str | None, as_json: bool) -> int:
    """Check this machine; `folder`: where a file is written, on the disk of the checkpoints."""
    import torch

    from .torchrun import run

    ranks = torch.cuda.device_count() or CPU_RANKS
    with tempfile.TemporaryDirectory(prefix="k3train-health-") as made:
        options = ["--folder", folder or made, *(["--json"] if as_json else [])]
        return run(
            ["--standalone", "--nnodes", "1", "--nproc-per-node", str(ranks), "-m", "launch.health", *options]
        )


def worker(arguments: Sequence[str]) -> int:
    """One rank: look alone, tell the others, and compare; the first rank prints what was found."""
    parser = argparse.ArgumentParser(prog="launch.health")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    import torch.distributed as dist

    found, problems = check(Path(options.folder))
    if dist.get_rank() == 0:
        for problem in problems:
            print(f"k3train: {problem}", file=sys.stderr, flush=True)
        if options.json:
            print(json.dumps({"healthy": not problems, "problems": problems, **found}), flush=True)
        elif not problems:
            print(_text(found), flush=True)
    # The agent ends the others as soon as one has failed: not before the first has printed.
    dist.all_gather_object([None] * dist.get_world_size(), None)
    dist.destroy_process_group()
    return UNHEALTHY if problems else DONE


def check(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What was found among all ranks, and what is wrong; joins them, and does not leave them."""
    import torch
    import torch.distributed as dist

    from k3train.fault_config import FaultConfig
    from k3train.train import health

    facts, problem = None, ""
    try:
        facts = health.of_rank(folder, "auto")
    except health.UnhealthyError as error:
        problem = str(error)
    on_gpu = torch.cuda.is_available()
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    # Objects travel through gloo: a GPU that is not well must not keep its rank from saying so.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, problem)
    try:
        if problems := [text for text in told if text]:
            return {}, problems
        assert facts is not None
        if on_gpu:
            torch.cuda.set_device(place)
        return health.meet(facts, place, FaultConfig()), []
    except health.UnhealthyError as error:
        return {}, [str(error)]


def _text(found: dict[str, Any]) -> str:
    return (
        f"healthy: {found['ranks']} ranks on {found['hosts']} hosts; products "
        f"{found['tflops_least']:.3g} TFLOP/s or more (median {found['tflops_median']:.3g}), all-reduce "
        f"{found['all_reduce_gb_per_second']:.3g} GB/s, disk {found['disk_mb_per_second_least']:.3g} MB/s or "
        f"more, clocks within {found['clock_skew_seconds']:.3g} s"
    )


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1:]))
